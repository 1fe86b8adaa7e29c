"""Random numbers of the host, which a recording would repeat for ever."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from onelaunch.step.host_randomness import depends_on_draws
from onelaunch.trial_runs import HostGenerators
from tests.conftest import LOSS_TOLERANCE
from tests.reference import assert_same_course
from tests.step.loops import batches, plain_losses
from tests.step.tape import taped_step

pytestmark = pytest.mark.usefixtures("no_code", "tapes")


class DropsLayers(nn.Module):
    """As wav2vec 2.0 and others do with `layerdrop`, it decides on the host in every pass."""

    def __init__(self, make: Callable[[], Any], draw: Callable[[Any], float]) -> None:
        super().__init__()
        self.first, self.second, self.generator, self.draw = nn.Linear(8, 8), nn.Linear(8, 4), make(), draw

    def forward(self, x: Tensor) -> Tensor:
        return self.second(x if self.draw(self.generator) < 0.5 else self.first(x))


DRAWS: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "random": (lambda: None, lambda _: random.random()),
    "NumPy": (lambda: None, lambda _: np.random.rand()),  # noqa: NPY002
    "own, of random": (lambda: random.Random(0), lambda own: own.random()),
    "own, of NumPy": (lambda: np.random.default_rng(0), lambda own: own.random()),
    "own, of PyTorch": (
        lambda: torch.Generator().manual_seed(0), lambda own: torch.randint(2, (), generator=own).numpy().item()
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DRAWS)
def test_random_numbers_of_the_host_end_recording(name: str) -> None:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    torch.manual_seed(0)
    model, data = DropsLayers(*DRAWS[name]), batches(12)
    other = copy.deepcopy(model)
    if isinstance(model.generator, torch.Generator):
        other.generator = model.generator.clone_state()
    before = HostGenerators()
    step, recordings = taped_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = [float(step(x, y)) for x, y in data]
    assert step.reason.startswith("forward, the loss or another thread draws random numbers on the host")
    assert step.reason.endswith("device=x.device)")
    assert recordings._retries == 0
    before.restore()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    assert_same_course(losses, plain_losses(other, optimizer, data), LOSS_TOLERANCE * 10)


def test_draws_of_another_thread_are_forgiven() -> None:
    class Draws(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            Draws.calls += 1
            if Draws.calls == 3:
                random.random()
            return super().forward(x)

    model = Draws(8, 4)
    step, recordings = taped_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for x, y in batches(6):
        step(x, y)
    assert step.reason == ""
    assert len(recordings) == 1


@pytest.mark.parametrize("draw", [lambda: torch.rand([]), lambda: torch.empty(1).uniform_(-1) / 2 + 0.5])
@pytest.mark.parametrize(
    ("limit", "depends"), [(0.0, False), (1e-4, True), (0.5, True), (1 - 1e-4, True), (1.0, False)]
)
def test_a_decision_by_chance(draw: Callable[[], Tensor], limit: float, depends: bool) -> None:
    state = torch.get_rng_state()
    assert depends_on_draws(lambda: torch.tensor(float(draw() < limit)), lambda: torch.set_rng_state(state)) == depends
    assert torch.equal(torch.get_rng_state(), state)


def test_other_random_numbers_and_losses_that_are_not_finite() -> None:
    def depends(loss: Callable[[], Tensor]) -> bool:
        return depends_on_draws(loss, lambda: None)

    assert depends(lambda: torch.randn(3).sum())
    assert depends(lambda: torch.randperm(100)[0])
    assert depends(lambda: torch.tensor(torch.nan))
    assert not depends(lambda: (torch.randn(3) * 0).sum())
