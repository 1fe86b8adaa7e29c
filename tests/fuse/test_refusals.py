"""Chains that are not fused, and the reason that is given; the result is that of the original all the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onelaunch as ol
from tests.fuse.compare import assert_same, fused_names, planned, reasons
from tests.fuse.small_models import rows

pytestmark = pytest.mark.usefixtures("one_thread", "every_chain")


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
