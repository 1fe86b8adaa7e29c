"""What a recording depends on changes on the way: level 2 and `fit` follow it, as plain PyTorch does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextvars import copy_context
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onelaunch as ol
from tests.capture.changing import CHANGES, READS, Average, network
from tests.conftest import LOSS_TOLERANCE
from tests.reference import assert_same_course
from tests.step.loops import plain_losses
from tests.step.tape import taped_step

pytestmark = [
    pytest.mark.usefixtures("no_code"), pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace"),
]  # fmt: skip
STEPS, CHANGED_AT = 16, 8
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
Loss = Callable[[Tensor, Tensor], Tensor]
Change = Callable[[Any], Any]


class Multiplied(nn.Module):
    def __init__(self, body: nn.Module, read: Callable[[], Any]) -> None:
        super().__init__()
        self.body, self.read = body, read

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) * self.read()


def in_the_loss(name: str) -> tuple[nn.Module, Loss, Change]:
    read, change = READS[name]()
    return network(), lambda output, target: F.cross_entropy(output, target) * read(), change


def in_forward(name: str) -> tuple[nn.Module, Loss, Change]:
    read, change = READS[name]()
    return Multiplied(network(), read), F.cross_entropy, change


def of_the_model(name: str) -> tuple[nn.Module, Loss, Change]:
    return network(), F.cross_entropy, CHANGES[name]


def replaced_by_forward(name: str) -> tuple[nn.Module, Loss, Change]:
    return nn.Sequential(network(), Average()), F.cross_entropy, lambda model: None


CASES = [
    *((in_the_loss, name) for name in READS), *((in_forward, name) for name in READS),
    *((of_the_model, name) for name in CHANGES), (replaced_by_forward, "a tensor"),
]  # fmt: skip
all_cases = pytest.mark.parametrize(("make", "name"), CASES, ids=[f"{make.__name__}: {name}" for make, name in CASES])


def rows(device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(12, 8, generator=generator).to(device), torch.randint(4, (12,), generator=generator).to(device)


def changed_losses(model: nn.Module, loss: Loss, change: Change, x: Tensor, y: Tensor) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses: list[float] = []
    for number in range(STEPS):
        if number == CHANGED_AT:
            change(model)
        losses += plain_losses(model, optimizer, [(x, y)], loss=loss)
    return losses


def expected_losses(make: Any, name: str, device: str) -> list[float]:
    model, loss, change = make(name)
    return copy_context().run(changed_losses, model.to(device), loss, change, *rows(device))


@all_cases
@pytest.mark.parametrize("device", DEVICES)
def test_train_step_follows(make: Any, name: str, device: str, request: pytest.FixtureRequest) -> None:
    if device == "cpu":
        request.getfixturevalue("tapes")
    model, loss, change = make(name)
    x, y = rows(device)
    optimizer = torch.optim.SGD(model.to(device).parameters(), lr=0.1, momentum=0.9)
    step: Any = taped_step(model, optimizer, loss)[0] if device == "cpu" else ol.train_step(model, loss, optimizer)

    def losses() -> Iterator[float]:
        for number in range(STEPS):
            if number == CHANGED_AT:
                change(model)
            yield float(step(x, y))

    found = copy_context().run(lambda: [*losses()])
    assert_same_course(found, expected_losses(make, name, device), 10 * LOSS_TOLERANCE)


def fit_losses(make: Any, name: str, device: str, engine: str) -> list[float]:
    model, loss, change = make(name)
    x, y = rows(device)

    def after_epoch(history: ol.History) -> None:
        if len(history.epochs) == CHANGED_AT:
            change(model)

    history = copy_context().run(
        lambda: ol.fit(
            model.to(device), x, y, epochs=STEPS, batch_size=len(x), loss=loss, optimizer="sgd", lr=0.1, momentum=0.9,
            precision="fp32", engine=engine, callbacks=[after_epoch], progress=False,
        )
    )  # fmt: skip
    return history.losses


@pytest.mark.parametrize("name", [*READS, *(name for name in CHANGES if name != "evaluate a layer")])
def test_fit_follows_on_a_cpu(name: str) -> None:
    """`fit` itself calls the model once more, and its `train()` before every epoch."""
    make = in_the_loss if name in READS else of_the_model
    assert_same_course(fit_losses(make, name, "cpu", "eager"), expected_losses(make, name, "cpu"), 10 * LOSS_TOLERANCE)


@pytest.mark.gpu
@all_cases
@pytest.mark.parametrize("engine", ["eager", "compiled"])
def test_fit_follows_on_a_gpu(make: Any, name: str, engine: str) -> None:
    if engine == "compiled" and make is not in_the_loss and (make is replaced_by_forward or _acts_always(name)):
        pytest.skip("this engine calls the model more often before the first step")
    found, expected = fit_losses(make, name, "cuda", engine), fit_losses(make, name, "cpu", "eager")
    assert_same_course(found, expected, 10 * LOSS_TOLERANCE)


@pytest.mark.parametrize(
    ("make", "name"),
    [case for case in CASES if case[0] is not in_the_loss and "gradients" not in case[1]],
    ids=lambda value: getattr(value, "__name__", value),
)
@pytest.mark.parametrize("device", DEVICES)
def test_fuse_follows(make: Any, name: str, device: str) -> None:
    x, _ = rows(device)

    def outputs(fused: bool) -> list[Tensor]:
        model, _, change = make(name)
        model = model.to(device).eval()
        called = ol.fuse(model) if fused else model
        found = []
        for number in range(8):
            if number == 4:
                change(called)
            found.append(called(x).clone())
        return found

    with torch.no_grad():
        found, expected = (copy_context().run(outputs, fused) for fused in (True, False))
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=1e-5, atol=1e-6)


def _acts_always(name: str) -> bool:
    return name in ("itertools.count", "random.Random") or "Generator" in name


def test_the_table_has_changes_that_matter() -> None:
    """A change that changes no loss would test nothing."""
    for make, name in CASES:
        model, loss, change = make(name)
        with_change = copy_context().run(changed_losses, model, loss, change, *rows("cpu"))
        model, loss, _ = make(name)
        without = copy_context().run(changed_losses, model, loss, lambda model: None, *rows("cpu"))
        same = make is replaced_by_forward or _acts_always(name) or name in ("memory of a weight", "a buffer")
        assert (with_change != without) != same, name


def test_other_batch_sizes(tapes: None) -> None:
    model = network()
    other = copy.deepcopy(model)
    optimizer, theirs = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, other))
    step, recordings = taped_step(model, optimizer, F.cross_entropy)
    for size in (5, 7, 5, 7, 5, 7, 5, 7, 9):
        x, y = torch.randn(size, 8), torch.randint(4, (size,))
        expected = F.cross_entropy(other(x), y)
        expected.backward()
        theirs.step()
        theirs.zero_grad()
        torch.testing.assert_close(step(x, y), expected.detach())
    assert len(recordings) == 2
