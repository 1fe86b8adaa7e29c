"""`ol.train_step` as recorded graphs: random numbers, several shapes, scalers, exceptions, memory."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onelaunch as ol
from onelaunch.capture.graph import clear_workspaces
from tests.conftest import LOSS_TOLERANCE
from tests.reference import assert_same_course
from tests.step.loops import batches, network, plain_losses

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def patched(no_code: None) -> None:
    """Without code generation."""
    torch.manual_seed(0)


def test_dropout_advances_and_repeats_under_a_seed() -> None:
    def run() -> list[float]:
        torch.manual_seed(3)
        model = network("cuda", 0.5)
        step = ol.train_step(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.0))
        (x, y), *_ = batches(1, "cuda")
        return [float(step(x, y)) for _ in range(8)]

    first = run()
    assert len(set(first)) == 8
    assert run() == first


def test_a_partial_batch_has_its_own_graph_and_loaded_state_is_read() -> None:
    model, data = network("cuda"), [*batches(5, "cuda"), *batches(5, "cuda", 7)] * 2
    other = copy.deepcopy(model)
    optimizer, theirs = (torch.optim.Adam(one.parameters(), lr=1e-2) for one in (model, other))
    step = ol.train_step(model, F.cross_entropy, optimizer)
    losses = [float(step(x, y)) for x, y in data]
    assert len(step._recordings) == 2
    expected = plain_losses(other, theirs, data)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    losses += [float(step(x, y)) for x, y in data]
    expected += plain_losses(other, theirs, data)
    assert_same_course(losses, expected, LOSS_TOLERANCE * 10)


def test_fp16_with_a_scaler() -> None:
    model, data = network("cuda"), batches(12, "cuda")
    other = copy.deepcopy(model)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    step = ol.train_step(model, F.cross_entropy, optimizer, autocast="fp16", scaler=scaler, clip_norm=1.0)
    losses = [float(step(x, y)) for x, y in data]
    assert step.reason == ""
    expected = plain_losses(other, torch.optim.Adam(other.parameters(), lr=1e-2), data, clip=1.0)
    assert_same_course(losses, expected, 0.02)


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.layer(x))
        return y * 2 if y.sum().item() > 0 else y


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # Dynamo's own, in PyTorch 2.11
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_model_that_cannot_be_recorded(accumulate: int, caplog: pytest.LogCaptureFixture) -> None:
    model, data = Reads().cuda(), batches(10, "cuda")
    other = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ol.train_step(model, F.cross_entropy, optimizer, accumulate=accumulate)
    with caplog.at_level(logging.WARNING, "onelaunch"):
        losses = [float(step(x, y)) for x, y in data]
    assert step.reason
    assert sum("operation by operation" in record.getMessage() for record in caplog.records) == 1
    expected = plain_losses(other, torch.optim.SGD(other.parameters(), lr=0.1), data, every=accumulate)
    assert_same_course(losses, expected, LOSS_TOLERANCE * 10)


def test_an_exception_between_replays() -> None:
    model, data = network("cuda"), batches(10, "cuda")
    other = copy.deepcopy(model)
    step = ol.train_step(model, F.cross_entropy, torch.optim.Adam(model.parameters()))
    losses = []
    for number, (x, y) in enumerate(data):
        if number in (1, 5):
            with pytest.raises(Exception):  # noqa: B017
                step(x[:, :3], y)
        losses.append(float(step(x, y)))
    assert_same_course(losses, plain_losses(other, torch.optim.Adam(other.parameters()), data), LOSS_TOLERANCE * 10)


def test_a_step_holds_one_workspace_of_the_matrix_library() -> None:
    """The backward pass runs in a thread with a workspace of its own: 32 MiB more, more than the whole of a small network."""
    model, (data, *_) = network("cuda"), batches(1, "cuda")
    clear_workspaces()
    before = torch.cuda.memory_allocated()
    square = torch.ones(64, 64, device="cuda")
    square = square @ square
    workspace = torch.cuda.memory_allocated() - before
    clear_workspaces()
    step = ol.train_step(model, F.cross_entropy, torch.optim.Adam(model.parameters()))
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(4):
        step(*data)
    assert step.reason == ""
    assert torch.cuda.max_memory_allocated() - before < 1.5 * workspace
