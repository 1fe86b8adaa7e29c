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

from onelaunch.step.model_state import ModelState
from onelaunch.trial_runs import Generators
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
    "own, of NumPy's past": (lambda: np.random.RandomState(0), lambda own: own.rand()),
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
    before = Generators()
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


class Configuration:
    def __init__(self, encoder_layerdrop: float) -> None:
        self.encoder_layerdrop = encoder_layerdrop


class Encoder(nn.Linear):
    config: Any = None


def test_layers_that_are_left_out_by_chance() -> None:
    plain, drops, keeps = Encoder(8, 8), Encoder(8, 8), Encoder(8, 8)
    drops.config, keeps.config = Configuration(0.1), Configuration(0.0)
    plain.config = {"layerdrop": 0.1}  # something else's
    for models, expected in (([plain], None), ([plain, keeps], False), ([keeps, drops], True)):
        assert ModelState([nn.Sequential(*models)], list).leaves_out_layers() is expected
    drops.layerdrop = 0.0
    assert ModelState([drops], list).leaves_out_layers() is True


def test_a_generator_without_a_state() -> None:
    model = DropsLayers(random.SystemRandom, lambda own: 0.0)
    step, _ = taped_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for x, y in batches(4):
        step(x, y)
    assert step.reason == ""
