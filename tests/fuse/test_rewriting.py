"""A fused call stands where the chain stood: what is made, changed or switched between its operations, and beside them."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onelaunch as ol
from onelaunch.fuse.aliases import Changes
from onelaunch.fuse.tracing import Trace
from tests.fuse.compare import assert_same, capture, fused_names, reasons
from tests.fuse.small_models import rows

pytestmark = pytest.mark.usefixtures("one_thread", "every_chain")


class Body(nn.Module):
    """A forward that is given, with a chain beside it that can always be fused."""

    def __init__(self, body: Callable[..., torch.Tensor], child: nn.Module | None = None) -> None:
        super().__init__()
        self.fc, self.last, self.norm = nn.Linear(12, 12), nn.Linear(12, 12), nn.BatchNorm1d(12)
        self.child = child or nn.Identity()
        self.register_buffer("table", torch.rand(12, dtype=torch.float64))
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, torch.tanh(self.last(x)))


class Scored(Body):
    def forward(self, x: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return self.body(self, torch.tanh(self.last(x)), scores)


# a target that is made, or changed, after the log_softmax


def late(m: Body, x: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    logs = F.log_softmax(x, 1)
    return F.nll_loss(logs, scores.argmax(1))


def late_from_a_chain(m: Body, x: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    logs = F.log_softmax(x, 1)
    return F.nll_loss(logs, F.relu(m.fc(scores)).argmax(1))


def filled(m: Body, x: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    target = scores.argmax(1)
    logs = F.log_softmax(x, 1)
    target.masked_fill_(scores[:, 0] > 0, -100)
    return F.nll_loss(logs, target)


@pytest.mark.parametrize("body", [late, late_from_a_chain, filled])
def test_target_of_a_loss_is_what_it_was_there(body: Callable[..., torch.Tensor]) -> None:
    model, x, scores = Scored(body).double(), rows(), rows()
    fused = ol.fuse(model)
    assert "log_softmax + nll_loss" in fused_names(fused, True)
    assert_same(model, fused, x, scores)
    compiled, names, _ = capture(model, x, scores)
    assert "log_softmax + nll_loss" in names
    torch.testing.assert_close(compiled(x, scores), model(x, scores), rtol=0, atol=1e-12)


class Doubles(nn.Module):
    """Changes its input, in a way that cannot be traced."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2) if isinstance(x, torch.Tensor) else x


def doubled(m: Body, x: torch.Tensor) -> torch.Tensor:
    x = x * 1.5
    target = x.argmax(1)
    logs = F.log_softmax(x, 1)
    m.child(x)
    return F.nll_loss(logs, target) + x.sum()


def moved_statistics(m: Body, x: torch.Tensor) -> torch.Tensor:
    h = m.fc(x)
    m.norm.running_mean.add_(0.5)  # type: ignore[union-attr]
    return F.gelu(m.norm(h))


def statistics_moved_by_another(m: Body, x: torch.Tensor) -> torch.Tensor:
    h = m.fc(x)
    other = F.batch_norm(x, m.norm.running_mean, m.norm.running_var, training=True)
    return F.gelu(m.norm(h)) + other


@pytest.mark.parametrize(
    ("body", "changer"),
    [(doubled, "child"), (moved_statistics, "add_"), (statistics_moved_by_another, "batch_norm")],
)
def test_what_a_chain_reads_changes_inside_it(body: Callable[..., torch.Tensor], changer: str) -> None:
    model = Body(body, Doubles()).double()
    fused = ol.fuse(model)
    assert "linear + tanh" in fused_names(fused, False)
    assert any(f"may be changed in place by {changer}" in reason for reason in reasons(fused, False))
    for tree in (model, fused):
        tree.eval()
    with torch.no_grad():
        for _ in range(2):
            x = rows()
            before = {name: buffer.clone() for name, buffer in model.named_buffers()}
            wanted = model(x)
            moved = {name: buffer.clone() for name, buffer in model.named_buffers()}
            for name, buffer in model.named_buffers():
                buffer.copy_(before[name])
            torch.testing.assert_close(fused(x), wanted, rtol=0, atol=1e-12)
            torch.testing.assert_close(dict(model.named_buffers()), moved, rtol=0, atol=1e-12)


def test_two_arguments_that_share_memory() -> None:
    class Twice(nn.Module):
        def forward(self, logits: torch.Tensor, other: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            logs = F.log_softmax(logits, 1)
            other.mul_(3)
            return F.nll_loss(logs, target)

    model, x, target = Twice(), rows(), torch.randint(12, (9,))
    fused = ol.fuse(model)
    wanted, got = (module(same, same[:], target) for module in (model, fused) for same in [x.clone()])
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def test_buffer_is_one_value_by_all_its_names() -> None:
    def body(m: Body, x: torch.Tensor) -> torch.Tensor:
        read = F.gelu(F.linear(m.table, m.fc.weight, m.fc.bias))
        m.table.add_(1)
        return x + read

    model = Body(body).double()
    fused = ol.fuse(model)
    assert "its input is changed in place by add_" in reasons(fused, True)
    x = rows()
    with torch.no_grad():
        wanted = model(x)
        model.table.sub_(1)  # type: ignore[operator, union-attr]
        torch.testing.assert_close(fused(x), wanted, rtol=0, atol=1e-12)


def test_loss_of_a_value_with_itself_is_left_to_pytorch() -> None:
    def body(m: Body, x: torch.Tensor) -> torch.Tensor:
        logs = F.log_softmax(x, 1)
        return F.nll_loss(logs, logs)

    fused = ol.fuse(Body(body).double())
    assert "nll_loss takes the value of log_softmax twice" in reasons(fused, True)
    with pytest.raises(RuntimeError):
        fused(rows())


def turned(m: Body, x: torch.Tensor) -> torch.Tensor:
    h = F.gelu(m.fc(x))
    torch.einsum("ij->ji", h).add_(1)
    return h


def passed_on(m: Body, x: torch.Tensor) -> torch.Tensor:
    h = F.gelu(m.fc(x))
    m.child(h).add_(1)
    return h


def test_views_that_do_not_look_like_one() -> None:
    child = nn.Sigmoid()
    child.register_forward_hook(lambda module, inputs, result: inputs[0])
    for body in (turned, passed_on):
        model = Body(body, child).double()
        fused = ol.fuse(model)
        assert reasons(fused, True)[0] == "its result is changed in place by add_"
        assert_same(model, fused, rows())


def test_name_that_code_would_read_otherwise() -> None:
    model = nn.Sequential()
    for name, module in (("a\\nb", nn.Linear(12, 12)), ("c", nn.Linear(12, 12)), ("d", nn.Tanh())):
        model.add_module(name, module)
    fused = ol.fuse(model.double(), rows())
    torch.testing.assert_close(fused(x := rows()), model(x), rtol=0, atol=1e-12)


# modes and changes that dynamo writes into a graph


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_mode_that_begins_inside_a_chain(mode: Callable[[], Any]) -> None:
    class Switches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.last = nn.Linear(12, 12), nn.Linear(12, 12)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.fc(x)
            with mode():
                gate = torch.sigmoid(h)
            return torch.tanh(self.last(x)) * gate.clone()

    model, x = Switches().double(), rows()
    compiled, names, why = capture(model, x)
    assert names == ["linear + tanh"]
    assert why == ["no_grad, autocast or the like begins or ends inside it"]
    for output in (compiled(x), model(x)):
        model.zero_grad()
        output.sum().backward()
        assert model.fc.weight.grad is None or mode not in (torch.no_grad, torch.inference_mode)
    assert_same(model, ol.fuse(model), x)


def changed_by(body: Callable[[torch.Tensor], Any]) -> list[str]:
    """What changes the first value of a captured graph."""
    found: list[str] = []

    def backend(gm: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        changes = Changes(Trace(gm.graph, gm, {}, {}))
        found.extend(str(value) for value, _ in changes.changed)
        return gm.forward

    torch.compiler.reset()
    torch.compile(body, backend=backend)(torch.ones(3, 4, dtype=torch.int64))
    return found


@pytest.mark.parametrize(
    "change",
    [
        lambda h: torch._foreach_add_([h], 1),
        lambda h: torch.ops.aten.add_.Tensor(h, h),
        lambda h: torch.ops.aten.add_(h, h),
        lambda h: F.hardtanh(h, -1, 1, True),
        lambda h: operator.ilshift(h, 1),
        lambda h: h.__imul__(2),
        lambda h: h.__setitem__(0, 1),
    ],
    ids=["list", "overload", "packet", "option by place", "shift", "method", "item"],
)
def test_changes_in_place_of_every_kind(change: Callable[[torch.Tensor], Any]) -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        value = x + 1
        change(value)
        return value

    assert set(changed_by(body)) == {"value"}


def test_in_place_operation_inside_a_module_that_is_called_as_a_whole() -> None:
    model = nn.Sequential(
        nn.Linear(12, 12),
        nn.ReLU(),
        nn.Dropout(0.0),
        nn.Sequential(nn.ReLU(inplace=True)),
        nn.Linear(12, 12),
        nn.Tanh(),
    ).double()
    model[3].register_forward_hook(lambda *_: None)
    fused = ol.fuse(model)
    assert fused_names(fused, True) == ["linear + tanh"]
    assert "its result is changed in place by 3" in reasons(fused, True)


# losses, and what is no target of them


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_probabilities_have_no_index_to_ignore(reduction: str) -> None:
    model = Scored(lambda m, x, target: F.cross_entropy(x, target, ignore_index=1, reduction=reduction)).double()
    x, target = rows(), rows().softmax(1)
    fused = ol.fuse(model)
    assert "cross_entropy" in fused_names(fused, True)
    for module in (model, fused):
        with pytest.raises(RuntimeError, match="ignore_index is not supported"):
            module(x, target)


class LogLoss(nn.Module):
    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.nll_loss(F.log_softmax(x, 1), target)


def test_probabilities_are_no_target_of_nll_loss() -> None:
    x, target = torch.randn(4, 3, dtype=torch.float64), torch.rand(4, 3, dtype=torch.float64)
    model = LogLoss()
    for run in (model, ol.fuse(model)):
        with pytest.raises(RuntimeError):
            run(x, target)
