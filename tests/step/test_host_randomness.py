"""Random numbers of the host, which a recording would repeat for ever."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

from onelaunch.step.recordings import Recordings
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
    step, _ = taped_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = [float(step(x, y)) for x, y in data]
    assert step.reason.startswith("what they depend on is not known: ")
    assert "(test_host_randomness.py:" in step.reason
    before.restore()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    assert_same_course(losses, plain_losses(other, optimizer, data), LOSS_TOLERANCE * 10)


def test_draws_of_another_thread_are_forgiven(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = Recordings._captured
    calls: list[float] = []

    def draws_meanwhile(*args: Any) -> Any:
        calls.append(random.random() if not calls else 0.0)
        return captured(*args)

    monkeypatch.setattr(Recordings, "_captured", draws_meanwhile)
    model = nn.Linear(8, 4)
    step, recordings = taped_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for x, y in batches(6):
        step(x, y)
    assert len(calls) == 2
    assert step.reason == ""
    assert len(recordings) == 1


def language_model(layerdrop: float) -> Any:
    sizes = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    settings = transformers.BartConfig(
        vocab_size=50, max_position_embeddings=16, encoder_layerdrop=layerdrop, dropout=0.0, **sizes, **heads
    )
    return transformers.BartForConditionalGeneration(settings)


@pytest.mark.parametrize("layerdrop", [0.0, 0.1])
def test_layers_that_are_left_out_by_chance(layerdrop: float) -> None:
    """Where the chance is 0, the model is compiled and recorded as a whole, although `transformers` draws a number."""
    torch.manual_seed(0)
    model = language_model(layerdrop)
    other, tokens = copy.deepcopy(model), torch.randint(3, 50, (2, 9))
    optimizer, theirs = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, other))
    step, recordings = taped_step(model, optimizer, None, compile=True)
    torch.manual_seed(1)
    losses = [float(step(input_ids=tokens, labels=tokens)) for _ in range(6)]
    assert bool(step.reason) == (layerdrop > 0)
    assert len(recordings) == (layerdrop == 0)
    torch.manual_seed(1)
    expected = []
    for _ in range(6):
        loss = other(input_ids=tokens, labels=tokens).loss
        loss.backward()
        theirs.step()
        theirs.zero_grad()
        expected.append(loss.item())
    assert_same_course(losses, expected, LOSS_TOLERANCE * 10)
    if layerdrop == 0:
        (one,) = recordings.all()
        model.model.encoder.layerdrop = 0.5
        assert not one.dependencies.hold()


def test_a_generator_without_a_state() -> None:
    model = DropsLayers(random.SystemRandom, lambda own: 0.0)
    step, _ = taped_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for x, y in batches(4):
        step(x, y)
    assert step.reason == ""
