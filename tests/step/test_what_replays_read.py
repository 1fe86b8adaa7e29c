"""Recorded steps on tapes against plain loops, where memory that a replay would read or write is replaced."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from onelaunch.capture import changes
from onelaunch.step.capturable_optimizer import CapturableOptimizer
from onelaunch.step.recordings import uncapturable_reason
from tests.step.changes import CHANGES, replace_activation_and_change_it
from tests.step.changes import network as changing_network
from tests.step.loops import batches, network
from tests.step.tape import assert_follows_a_plain_loop, is_recording, taped_step

pytestmark = pytest.mark.usefixtures("no_code", "tapes")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_tapes_follow_a_plain_loop(accumulate: int) -> None:
    step = assert_follows_a_plain_loop(network(), batches(14), momentum=0.9, weight_decay=0.1, accumulate=accumulate)
    assert step.reason == ""
    assert sum(one.graph.replays for one in step._recordings.all()) == 14 - 2 * accumulate


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_the_model_counts(name: str) -> None:
    step = assert_follows_a_plain_loop(changing_network(), batches(14), lambda model, _: CHANGES[name](model))
    assert step.reason == ""


def test_a_setting_of_a_layer_that_was_replaced_counts() -> None:
    def change(model: Any, _: Any) -> None:
        if next(number) // 2 in (7, 11):  # it is called for two models
            replace_activation_and_change_it(model)

    number = itertools.count()
    step = assert_follows_a_plain_loop(changing_network(), batches(16), change, at=None)
    assert step.reason == ""


@pytest.mark.parametrize("many", [4, 20])
def test_changes_from_epoch_to_epoch_do_not_end_recording(many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as averaged weights that are swapped in for an evaluation: four replays between each two."""
    monkeypatch.setattr(changes, "MANY_REPLAYS", many)
    epochs = iter(range(30))

    def swap(model: Any, optimizer: Any) -> None:
        if next(epochs) % 6 == 5:
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()

    model = network()
    step, _ = taped_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for x, y in batches(30):
        step(x, y)
        swap(model, step.optimizer)
    assert bool(step.reason) == (many == 20)


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


def test_what_forward_sets_in_every_call_costs_no_recording(caplog: pytest.LogCaptureFixture) -> None:
    data = [one for rows in (5, 7) * 5 for one in batches(1, rows=rows)]
    model = KeepsLast()
    step = assert_follows_a_plain_loop(model, data, lambda model, _: model(torch.randn(3, 8)))
    # The first recording took the number of calls for a constant.
    assert [one.graph.replays for one in step._recordings.all()] == [3, 2]
    assert step._recordings._changes.count <= 1
    assert step.reason == ""
    (warning,) = [record.getMessage() for record in caplog.records if record.name == "onelaunch"]
    assert warning.startswith("train_step: forward changes KeepsLast.calls in every call, but not in recorded steps")


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
    assert step._recordings._changes.count == 0
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
    assert [one.graph.replays for one in step._recordings.all()] == [8, 4]


def test_forward_that_replaces_a_buffer_by_one_of_another_shape_is_not_recorded() -> None:
    step = assert_follows_a_plain_loop(nn.Sequential(nn.Linear(8, 4), Average(grows=True)), batches(10))
    assert step.reason.startswith(
        "forward changes model[1].mean in every call: keep it in a buffer, and change it in place"
    )


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
    (one,) = recordings.all()
    kept = {leaf.data_ptr() for leaf in tree_leaves([one.memory, one.dependencies.tensors]) if isinstance(leaf, Tensor)}
    moments = [leaf for state in step.optimizer.state.values() for leaf in state.values()]
    for tensor in (*tree_leaves(model.values), *model.parameters(), *moments):
        assert tensor.data_ptr() in kept


def test_embeddings_with_sparse_gradients_are_not_recorded() -> None:
    model = nn.Sequential(nn.EmbeddingBag(9, 8, sparse=True), nn.Linear(8, 4))
    optimizer = CapturableOptimizer(torch.optim.SGD(model.parameters(), 0.1), torch.device("cuda:0"))
    assert uncapturable_reason(model, optimizer).startswith("embeddings with sparse=True")


class CannotBeRecorded(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if is_recording():
            raise RuntimeError("operation not permitted when stream is capturing")
        return x


def test_a_recording_that_fails_leaves_the_model_as_it_was() -> None:
    """What forward replaced meanwhile was never computed: new memory of parameters, attributes, counters."""

    class Overwritten(MaxNorm):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if is_recording():
                self.weight.data.fill_(torch.nan)
            return y

    keeps = KeepsLast()
    step = assert_follows_a_plain_loop(nn.Sequential(Overwritten(8, 8), keeps, CannotBeRecorded()), batches(6))
    assert step.reason.startswith("operation not permitted when stream is capturing, at test_what_replays_read.py:")
    assert keeps.calls == 6
    assert torch.isfinite(keeps.last).all()


def test_a_step_that_dynamo_cannot_read_is_not_recorded() -> None:
    class Graph(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 4)
            self.register_buffer("edges", torch.eye(12).to_sparse())

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.edges @ x)

    step, recordings = taped_step(model := Graph(), torch.optim.SGD(model.parameters(), lr=0.1))
    for x, y in batches(3):
        assert torch.isfinite(step(x, y))
    assert step.reason.startswith(
        "what they depend on is not known: Attempted to wrap sparse Tensor (test_what_replays_read.py:"
    )
    assert len(recordings) == 0


class Talks(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        print("forward")
        warnings.warn("unwise", stacklevel=2)
        return super().forward(x)


@pytest.mark.filterwarnings("ignore")
def test_a_message_of_forward_is_no_reason(capsys: pytest.CaptureFixture[str]) -> None:
    step = assert_follows_a_plain_loop(Talks(8, 4), batches(10))
    assert step.reason == ""
    assert capsys.readouterr().out.count("forward") == 10 + 3  # of the plain loop, the warm-up and the recording
