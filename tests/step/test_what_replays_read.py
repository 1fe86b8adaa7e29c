"""Recorded steps on tapes against plain loops, where memory that a replay would read or write is replaced."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from onelaunch.step.capturable_optimizer import CapturableOptimizer
from onelaunch.step.recordings import uncapturable_reason
from tests.conftest import LOSS_TOLERANCE, WEIGHT_TOLERANCE
from tests.reference import assert_same_course, assert_same_weights
from tests.step.changes import CHANGES
from tests.step.changes import network as changing_network
from tests.step.loops import batches, network
from tests.step.tape import Tape, taped_step, tapes

__all__ = ["tapes"]
pytestmark = pytest.mark.usefixtures("no_code", "tapes")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def assert_follows_a_plain_loop(
    model: nn.Module, data: list[tuple[Tensor, Tensor]], change: Callable[[Any, Any], Any] = lambda model, optimizer: None,
    *, at: int | None = 7, accumulate: int = 1, **options: Any,
) -> Any:  # fmt: skip
    """The course of losses and the weights at the end, with a change on the way: at this step, or at all if it is None."""
    other = copy.deepcopy(model)
    options = {"lr": 0.1, **options}
    mine, theirs = (torch.optim.SGD(one.parameters(), **options) for one in (model, other))
    step, recordings = taped_step(model, mine, accumulate=accumulate)
    losses, expected = [], []
    for number, (x, y) in enumerate(data):
        assert number != at or len(recordings) > 0 or step.reason
        if at in (None, number):
            change(model, mine)
            change(other, theirs)
        losses.append(float(step(x, y)))
        loss = F.cross_entropy(other(x), y)
        (loss / accumulate).backward()
        if (number + 1) % accumulate == 0:
            theirs.step()
            theirs.zero_grad()
        expected.append(loss.item())
    assert_same_course(losses, expected, LOSS_TOLERANCE * 10)
    assert_same_weights(model, other, WEIGHT_TOLERANCE)
    return step


@pytest.mark.parametrize("accumulate", [1, 2])
def test_tapes_follow_a_plain_loop(accumulate: int) -> None:
    step = assert_follows_a_plain_loop(network(), batches(14), momentum=0.9, weight_decay=0.1, accumulate=accumulate)
    assert step.reason == ""
    assert sum(one.graph.replays for one in step._recordings._recorded.values()) == 14 - 2 * accumulate


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_the_model_counts(name: str) -> None:
    step = assert_follows_a_plain_loop(changing_network(), batches(14), lambda model, _: CHANGES[name](model))
    assert step.reason == ""


class Grows(nn.Module):
    """Rotary embeddings are like this: what is computed for the longest input so far replaces a buffer, or an attribute."""

    def __init__(self, buffer: bool) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.cached, self.scale = 0, torch.zeros(0, 1)
        if buffer:
            del self.scale
            self.register_buffer("scale", torch.zeros(0, 1))

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.cached:
            self.cached, self.scale = len(x), torch.cos(torch.arange(len(x)) / len(x))[:, None]
        return self.head(self.body(x) * self.scale[: len(x)])


@pytest.mark.parametrize("buffer", [True, False])
def test_forward_replaces_what_an_earlier_recording_reads(buffer: bool) -> None:
    data = [*batches(5, rows=4), *batches(5, rows=9), *batches(2, rows=4), *batches(2, rows=9), *batches(4, rows=4)]
    step = assert_follows_a_plain_loop(Grows(buffer), data, at=len(data))
    assert step.reason == ""
    assert len(step._recordings) == 2


class KeepsLast(nn.Module):
    """It sets attributes in every call; no recording depends on them."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.calls = nn.Linear(8, 4), 0
        self.last: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = y = self.body(x)
        self.calls += 1
        self.rows = len(x)
        return y * 2


def test_what_forward_sets_in_every_call_costs_no_recording() -> None:
    data = [one for rows in (5, 7) * 5 for one in batches(1, rows=rows)]
    model = KeepsLast()
    step = assert_follows_a_plain_loop(model, data, lambda model, _: model(torch.randn(3, 8)))
    assert [one.graph.replays for one in step._recordings._recorded.values()] == [3, 3]
    assert step._recordings._forgotten <= 1
    assert step.reason == ""


@pytest.mark.parametrize(
    "data", [batches(1) * 14, batches(8, rows=5) + batches(8, rows=6)], ids=["one batch", "two sizes"]
)
def test_an_evaluation_after_every_step_costs_no_recording(data: list[tuple[Tensor, Tensor]]) -> None:
    def evaluate(model: Any, optimizer: Any) -> None:
        model.eval()
        with torch.no_grad():
            model(torch.randn(3, 8))
        model.train()
        model.value = float(torch.rand(()))  # what was not there cannot have been read

    step = assert_follows_a_plain_loop(KeepsLast(), data, evaluate, at=None)
    assert step._recordings._forgotten == 0
    assert step.reason == ""


class MaxNorm(nn.Linear):
    """The layer of EEGNet: forward gives the weight other memory."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=0.5)
        return super().forward(x)


class Average(nn.Module):
    """Forward replaces a buffer, from which the next call goes on."""

    def __init__(self, grows: bool = False) -> None:
        super().__init__()
        self.grows = grows
        self.register_buffer("mean", torch.zeros(1, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.mean: Tensor = self.mean * 0.9 + x.detach().mean(0, keepdim=True)
        if self.grows:
            self.mean = torch.cat([self.mean, self.mean[:1]])
        return x - self.mean.mean(0)


def test_forward_that_replaces_memory_goes_on_from_it() -> None:
    model = nn.Sequential(MaxNorm(8, 16), nn.Tanh(), nn.Linear(16, 4), Average())
    data = [*batches(6), *batches(6, rows=5), *batches(4)]
    step = assert_follows_a_plain_loop(model, data, at=len(data), momentum=0.9)
    assert step.reason == ""
    assert [one.graph.replays for one in step._recordings._recorded.values()] == [8, 4]


def test_forward_that_replaces_a_buffer_by_one_of_another_shape_is_not_recorded() -> None:
    step = assert_follows_a_plain_loop(nn.Sequential(nn.Linear(8, 4), Average(grows=True)), batches(10))
    assert step.reason.startswith("forward replaces a parameter, buffer or layer: change it in place")


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_gradients_that_the_caller_releases(momentum: float) -> None:
    """`optimizer.zero_grad()` may have stayed in the loop: recordings with `accumulate` go on adding to the same memory."""
    step = assert_follows_a_plain_loop(
        network(), batches(26), lambda model, optimizer: optimizer.zero_grad(), at=None, accumulate=2, momentum=momentum,
    )  # fmt: skip
    assert step.reason == ""


def test_memory_that_a_recording_reads_lives_as_long() -> None:
    class Cache(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.values = nn.Linear(8, 4), (torch.ones(()), [torch.ones(())])

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * self.values[0] * self.values[1][0]

    model = Cache()
    step, recordings = taped_step(model, torch.optim.Adam(model.parameters()))
    for x, y in batches(4):
        step(x, y)
    (one,) = recordings._recorded.values()
    kept = {leaf.data_ptr() for leaf in tree_leaves(one.memory) if isinstance(leaf, Tensor)}
    moments = [leaf for state in step.optimizer.state.values() for leaf in state.values()]
    for tensor in (*tree_leaves(model.values), *model.parameters(), *moments):
        assert tensor.data_ptr() in kept


def test_embeddings_with_sparse_gradients_are_not_recorded() -> None:
    model = nn.Sequential(nn.EmbeddingBag(9, 8, sparse=True), nn.Linear(8, 4))
    optimizer = CapturableOptimizer(torch.optim.SGD(model.parameters(), 0.1), torch.device("cuda:0"))
    assert uncapturable_reason(model, optimizer).startswith("embeddings with sparse=True")


class CannotBeRecorded(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if isinstance(torch.utils._python_dispatch._get_current_dispatch_mode(), Tape):
            raise RuntimeError("operation not permitted when stream is capturing")
        return x


def test_a_recording_that_fails_leaves_the_model_as_it_was() -> None:
    """What forward replaced meanwhile was never computed: new memory of parameters, attributes, counters."""

    class Overwritten(MaxNorm):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if isinstance(torch.utils._python_dispatch._get_current_dispatch_mode(), Tape):
                self.weight.data.fill_(torch.nan)
            return y

    keeps = KeepsLast()
    step = assert_follows_a_plain_loop(nn.Sequential(Overwritten(8, 8), keeps, CannotBeRecorded()), batches(6))
    assert step.reason == "operation not permitted when stream is capturing"
    assert keeps.calls == 6
    assert torch.isfinite(keeps.last).all()


def keep_first(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][:1]


def drop_in_place(model: Any, optimizer: Any) -> None:
    del optimizer.param_groups[0]["params"][1:]


def another_state(model: Any, optimizer: Any) -> None:
    optimizer.state = type(optimizer.state)(dict)


OPTIMIZER_CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "a cleared state": lambda model, optimizer: optimizer.state.clear(),
    "another state": another_state,
    "another state of one parameter": lambda model, optimizer: optimizer.state.update({model[0].weight: {}}),
    "fewer parameters": keep_first,
    "fewer parameters in the same list": drop_in_place,
    "weight decay": lambda model, optimizer: optimizer.param_groups[0].update(weight_decay=0.3),
    "a tensor of the user's own": lambda model, optimizer: optimizer.param_groups[0].update(mask=torch.ones(3)),
}


@pytest.mark.parametrize("name", OPTIMIZER_CHANGES)
def test_a_change_of_the_optimizer_counts(name: str) -> None:
    step = assert_follows_a_plain_loop(network(), batches(14), OPTIMIZER_CHANGES[name], momentum=0.9)
    assert step.reason == ""


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("frozen", [False, True])
def test_layers_that_are_frozen_or_unfrozen_on_the_way(frozen: bool, accumulate: int) -> None:
    """A frozen one does not move at all; one that is unfrozen has no momentum yet, which the fused form of SGD refuses."""
    model = network()
    model[0].requires_grad_(not frozen)
    step = assert_follows_a_plain_loop(
        model, batches(24), lambda model, _: model[0].requires_grad_(frozen), at=10, accumulate=accumulate, momentum=0.9,
        weight_decay=0.1,
    )  # fmt: skip
    assert step.reason == ""


def test_the_rate_may_be_a_tensor_elsewhere_that_changes_in_place() -> None:
    def halve(optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"].mul_(0.5)

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1, dtype=torch.float64))
    capturable = CapturableOptimizer(optimizer, torch.device("cpu:0"))
    capturable.prepare()
    for number in range(4):
        assert capturable.ready()
        assert float(capturable.rates[0]) == pytest.approx(0.1 / 2**number)
        halve(optimizer)


def test_changes_of_the_model_and_of_the_optimizer_at_once() -> None:
    """The first is no change that forward makes: the next one of its kind counts too."""
    model = network(dropout=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step, recordings = taped_step(model, optimizer)
    (data, *_) = batches(1)
    for changed in (0.2, 0.3):
        model[2].p = changed
        optimizer.param_groups[0]["weight_decay"] = changed
        for _ in range(4):
            step(*data)
        assert len(recordings) == 1
    (recorded,) = recordings._recorded.values()
    model[2].p = 0.4
    step(*data)
    assert recorded not in recordings._recorded.values()


def test_a_sparse_buffer_has_no_address() -> None:
    class Graph(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 4)
            self.register_buffer("edges", torch.eye(12).to_sparse())

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.edges @ x)

    step, recordings = taped_step(model := Graph(), torch.optim.SGD(model.parameters(), lr=0.1))
    for x, y in batches(3):
        assert torch.isfinite(step(x, y))
    assert len(recordings) == 1
