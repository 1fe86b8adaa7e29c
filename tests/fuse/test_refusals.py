"""What is not fused over, and the reason that is given; the result is that of the original all the same."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import checkpoint as checkpointing

import onelaunch as ol
from onelaunch.fuse.arguments import Arguments
from onelaunch.fuse.placing import regions
from onelaunch.fuse.tracing import RefusedError, trace
from tests.fuse.compare import assert_same, fused_names, planned, reasons

renamed = checkpointing.checkpoint
pytestmark = pytest.mark.usefixtures("one_thread", "every_chain")


def rows() -> torch.Tensor:
    return torch.randn(9, 12, dtype=torch.float64)


class Layers(nn.Module):
    """A block whose forward is given; one chain in it can always be fused."""

    def __init__(self, body: Callable[[Layers, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.fc, self.fc2, self.last = (nn.Linear(12, 12) for _ in range(3))
        self.norm = nn.BatchNorm1d(12)
        self.act, self.drop = nn.ReLU(), nn.Dropout(0.0)
        self.half = nn.Dropout(0.5)
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.last(self.body(self, x)))


def two_readers(m: Layers, x: torch.Tensor) -> torch.Tensor:
    h = m.fc(x)
    return m.act(h) + h


def changed_later(m: Layers, x: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(m.fc(x)).mul(1).add_(1) + F.gelu(m.fc2(x)).view(-1, 12).add_(1)


def augmented(m: Layers, x: torch.Tensor) -> torch.Tensor:
    h = F.silu(m.fc(x))
    h += 1
    return h


def input_changed(m: Layers, x: torch.Tensor) -> torch.Tensor:
    h = x * 2
    with_chain = F.gelu(F.linear(h, m.fc.weight.detach()))
    h.add_(1)
    return with_chain + h


def shared(m: Layers, x: torch.Tensor) -> torch.Tensor:
    return m.act(m.fc(m.act(m.fc(x))))


def relu_in_place(m: Layers, x: torch.Tensor) -> torch.Tensor:
    return F.dropout(F.relu(x, inplace=True), 0.5, m.training) * 0 + x


def slope(m: Layers, x: torch.Tensor) -> torch.Tensor:
    return F.leaky_relu(m.fc(x), 0.2)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (two_readers, "the value of fc has 2 readers"),
        (changed_later, "its result is changed in place by add_"),
        (augmented, "its result is changed in place by iadd"),
        (input_changed, "its input is changed in place by add_"),
        (shared, "fc is shared"),
        (relu_in_place, "relu works in place"),
        (slope, "slope of 0.2"),
    ],
)
def test_reason(body: Callable[[Layers, torch.Tensor], torch.Tensor], reason: str) -> None:
    model = Layers(body).double()
    fused = ol.fuse(model)
    assert "linear + tanh" in fused_names(fused, True)
    assert any(reason in given for given in reasons(fused, True)), reasons(fused, True)
    assert_same(model, fused, rows())


def test_hook_that_was_there_and_one_that_comes_later() -> None:
    model = nn.Sequential(
        nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 12), nn.Sigmoid(), nn.Linear(12, 12), nn.Tanh()
    ).double()
    seen: list[str] = []
    model[1].register_forward_hook(lambda *_: seen.append("relu"))
    fused = ol.fuse(model)
    assert fused_names(fused, True) == ["linear + sigmoid", "linear + tanh"]
    assert any("1 has a hook" in reason for reason in reasons(fused, True))
    fused(rows())
    assert seen == ["relu"]
    handle = fused[3].register_forward_hook(lambda *_: seen.append("sigmoid"))
    fused(rows())
    assert seen == ["relu", "relu", "sigmoid"]
    handle.remove()
    fused[4].register_full_backward_hook(lambda *_: seen.append("backward"))
    fused(rows().requires_grad_()).sum().backward()
    assert seen[3:] == ["relu", "backward"]
    assert_same(model, fused, rows())


def test_global_hooks_see_every_module() -> None:
    model = nn.Sequential(nn.Linear(12, 12), nn.ReLU()).double()
    fused = ol.fuse(model)
    seen: list[str] = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__))
    fused(rows())
    handle.remove()
    assert seen == ["Linear", "ReLU", "Sequential"]


def test_subclass_and_replaced_forward() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    model = nn.Sequential(
        Scaled(12, 12), nn.ReLU(), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 12), nn.Tanh()
    ).double()
    patched = model[2]
    patched.forward = lambda x: F.linear(x, patched.weight) * 3  # type: ignore[method-assign]
    fused = ol.fuse(model)
    assert fused_names(fused, True) == ["linear + tanh"]
    given = reasons(fused, True)
    assert "0 is a Scaled, a subclass of nn.Linear" in given
    assert "2 has a forward of its own" in given
    assert_same(model, fused, rows())


def test_parametrized_layer() -> None:
    model = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(12, 12)), nn.ReLU(), nn.Linear(12, 12), nn.Tanh()
    )
    fused = ol.fuse(model.double())
    assert fused_names(fused, True) == ["linear + tanh"]
    assert_same(model, fused, rows())


def test_frozen_batch_norm_with_live_dropout() -> None:
    model = nn.Sequential(nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.5)).double()
    fused = ol.fuse(model)
    fused[0].eval()
    assert planned(fused, rows()) == ["batch_norm + relu"]
    y = fused(rows())
    assert (y == 0).double().mean() > 0.6


# forwards that a trace must not be believed for


class Untraceable(nn.Module):
    mean: torch.Tensor
    steps: torch.Tensor

    def __init__(self, body: Callable[[Untraceable, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.fc, self.scale = nn.Linear(12, 12), nn.Parameter(torch.ones(12))
        self.calls = 0
        self.kept: list[torch.Tensor] = []
        self.register_buffer("mean", torch.zeros(12))
        self.register_buffer("steps", torch.zeros(()))
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, F.relu(self.fc(x)))


def branches(m: Untraceable, x: torch.Tensor) -> torch.Tensor:
    return x if x.sum() > 0 else -x


def asks_type(m: Untraceable, x: torch.Tensor) -> torch.Tensor:
    return x if torch.is_tensor(x) else x[0]


def draws(m: Untraceable, x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand(12, dtype=torch.float64)


def draws_in_numpy(m: Untraceable, x: torch.Tensor) -> torch.Tensor:
    return x * float(np.random.rand())  # noqa: NPY002


def draws_in_python(m: Untraceable, x: torch.Tensor) -> torch.Tensor:
    return x * random.random()


def counts(m: Untraceable, x: torch.Tensor) -> torch.Tensor:
    m.calls += 1
    return x


def keeps(m: Untraceable, x: torch.Tensor) -> torch.Tensor:
    m.kept.append(x)
    return x


def replaces_a_buffer(m: Untraceable, x: torch.Tensor) -> torch.Tensor:
    m.mean = 0.9 * m.mean + x.detach().mean(0)
    return x - m.mean


def counts_in_a_buffer(m: Untraceable, x: torch.Tensor) -> torch.Tensor:
    m.steps += 1
    return x * m.steps


def without_grad(m: Untraceable, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = x * 2
    return x + y


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (branches, "control flow"),
        (draws, "makes a tensor of its own"),
        (draws_in_python, "draws random numbers"),
        (draws_in_numpy, "draws random numbers"),
        (counts, "changes its attribute calls"),
        (keeps, "changes its attribute kept"),
        (replaces_a_buffer, "replaces its buffers"),
        (counts_in_a_buffer, "replaces its buffers"),
        (without_grad, "enters no_grad"),
    ],
)
def test_refused_forward(body: Callable[[Untraceable, torch.Tensor], torch.Tensor], reason: str) -> None:
    model = Untraceable(body).double()
    with pytest.raises(RefusedError, match=reason):
        trace(model, Arguments.required_by(Untraceable.forward))
    assert model.calls == 0
    assert model.kept == []
    assert all(isinstance(buffer, torch.Tensor) for buffer in model.buffers())
    outer = nn.Sequential(model, nn.Linear(12, 12), nn.Tanh()).double()
    fused = ol.fuse(outer)
    assert fused_names(fused, True) == ["linear + tanh"]
    if body not in (draws, draws_in_numpy, draws_in_python):
        assert_same(outer, fused, rows())


def test_a_forward_that_asks_for_types_is_left_alone() -> None:
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(12, 12)

        def forward(self, x: torch.Tensor | list[torch.Tensor]) -> torch.Tensor:
            x = x if isinstance(x, torch.Tensor) else x[0]
            return F.relu(self.fc(x))

    model = Asks().double()
    assert ol.fuse(model) is model
    with pytest.raises(RefusedError, match="calls isinstance"):
        trace(model, Arguments.required_by(Asks.forward))


class Contexts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Sequential(nn.Linear(12, 12), nn.ReLU()), nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.last(self.helped(x)))

    def helped(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


class Checkpointed(Contexts):
    def helped(self, x: torch.Tensor) -> torch.Tensor:
        return checkpointing.checkpoint(self.inner, x, use_reentrant=False)


class Hidden(Contexts):
    def helped(self, x: torch.Tensor) -> torch.Tensor:
        return renamed(self.inner, x, use_reentrant=False)


class InFloat(Contexts):
    def helped(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.inner(x)


@pytest.mark.parametrize(
    ("kind", "reason"), [(Checkpointed, "calls checkpoint"), (InFloat, "calls autocast"), (Hidden, "or a checkpoint")]
)
def test_contexts_that_a_graph_does_not_record(kind: type[Contexts], reason: str) -> None:
    assert len(regions(ol.fuse(Contexts()))) == 2
    model = kind().double()
    fused = ol.fuse(model)
    assert [region.path for region in regions(fused)] == ["inner"]
    assert_same(model, fused, rows())
    with pytest.raises(RefusedError, match=reason):
        trace(model, Arguments.required_by(kind.forward))


def test_an_attribute_that_changes_makes_another_plan() -> None:
    class Switch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.positive = nn.Linear(12, 12), True

        def forward(self, x: torch.Tensor, scale: float = 1.0, shift: torch.Tensor | None = None) -> torch.Tensor:
            h = self.fc(x)
            h = F.relu(h) if self.positive else torch.tanh(h)
            h = h * scale
            return h if shift is None else h + shift

    model = Switch().double()
    fused = ol.fuse(model)
    for positive in (True, False, True):
        model.positive = fused.positive = positive
        assert_same(model, fused, rows())
        assert_same(model, fused, rows(), 2.0)
        assert_same(model, fused, rows(), 2)
        assert_same(model, fused, rows(), scale=3.0, shift=rows())
    for number in range(40):  # constants that never repeat: no more plans than are allowed
        assert_same(model, fused, rows(), float(number))
    assert len(regions(fused)[0].plans) <= 16


def test_forwards_with_star_arguments_and_defaults_only() -> None:
    class Star(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(12, 12)

        def forward(self, *inputs: torch.Tensor, **options: float) -> torch.Tensor:
            return F.relu(self.fc(inputs[0])) * options.get("scale", 1.0)

    class Optional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(12, 12)

        def forward(self, x: torch.Tensor | None = None, mask: torch.Tensor | None = None) -> torch.Tensor:
            assert x is not None
            y = torch.tanh(self.fc(x))
            return y if mask is None else y * mask

    star, optional = Star().double(), Optional().double()
    assert fused_names(ol.fuse(star), True) == ["linear + relu"]
    assert_same(star, ol.fuse(star), rows())
    assert_same(star, ol.fuse(star), rows(), scale=2.0)
    assert fused_names(ol.fuse(optional), True) == ["linear + tanh"]
    assert_same(optional, ol.fuse(optional), rows())
    assert_same(optional, ol.fuse(optional), mask=rows(), x=rows())


def test_a_child_that_is_replaced() -> None:
    model = nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Dropout(0.0)).double()
    fused = ol.fuse(model)
    fused[1] = nn.Tanh()
    x = rows()
    torch.testing.assert_close(fused(x), torch.tanh(model[0](x)), rtol=0, atol=1e-12)
    fused.append(nn.Sigmoid())
    torch.testing.assert_close(fused(x), torch.sigmoid(torch.tanh(model[0](x))), rtol=0, atol=1e-12)
