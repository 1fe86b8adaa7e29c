"""The eager engine follows a hand-written PyTorch loop in every step: losses, weights, masks and running statistics."""

from __future__ import annotations

import copy
from itertools import cycle

import pytest
import torch
from torch import nn

import onelaunch as ol
from onelaunch import activations, optimizers
from onelaunch.rng import dropout_keep
from onelaunch.run.schedule import SCHEDULES
from tests.conftest import LOSS_TOLERANCE, WEIGHT_TOLERANCE
from tests.pairwise import cases
from tests.reference import (
    ACTIVATIONS,
    LOSSES,
    OPTIMIZERS,
    assert_same_course,
    assert_same_weights,
    plain_loop,
    problem,
)

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS, BATCH = 25, 32  # five epochs of 150 rows
MANY_STEPS = 200
ON_DEVICES = [
    *zip(cycle(["cpu"]), OPTIMIZERS, cycle(LOSSES), strict=False),
    *(pytest.param("cuda", name, loss, marks=pytest.mark.gpu) for name in OPTIMIZERS for loss in LOSSES),
]


def network(activation: str = "relu", outputs: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(7, 16), ACTIVATIONS[activation](), nn.Linear(16, outputs))


@pytest.fixture(autouse=True)
def fixed_seed() -> None:
    """Lion's sign turns a rounding error around zero into a whole step, which some random data would meet."""
    torch.manual_seed(4)


def test_the_reference_has_every_name():
    assert set(ACTIVATIONS) == set(activations.ACTIVATIONS)
    assert {options["optimizer"] for options in OPTIMIZERS.values()} == set(optimizers.OPTIMIZERS)


@pytest.mark.parametrize(
    ("optimizer", "loss", "activation", "schedule"),
    cases(tuple(OPTIMIZERS), tuple(LOSSES), tuple(ACTIVATIONS), SCHEDULES),
)
def test_follows_the_plain_loop(optimizer, loss, activation, schedule):
    x, y = problem(loss)
    model = network(activation)
    twin = copy.deepcopy(model)
    options = OPTIMIZERS[optimizer]
    expected = plain_loop(
        twin, x, y, steps=STEPS, batch_size=BATCH, options=options, schedule=schedule, loss=loss, seed=3
    )
    history = ol.fit(
        model, x, y, steps=STEPS, batch_size=BATCH, schedule=schedule, loss=loss, seed=3, engine="eager",
        progress=False, **options,
    )  # fmt: skip
    assert_same_course(history.losses, expected, LOSS_TOLERANCE)
    assert_same_weights(model, twin, WEIGHT_TOLERANCE)


@pytest.mark.parametrize(("device", "optimizer", "loss"), ON_DEVICES)
def test_200_steps_follow_the_plain_loop_on_each_device(device, optimizer, loss):
    x, y = (tensor.to(device) for tensor in problem(loss))
    model = network("gelu").to(device)
    twin = copy.deepcopy(model)
    options = OPTIMIZERS[optimizer]
    expected = plain_loop(twin, x, y, steps=MANY_STEPS, batch_size=BATCH, options=options, loss=loss)
    history = ol.fit(
        model, x, y, steps=MANY_STEPS, batch_size=BATCH, loss=loss, engine="eager", precision="fp32", progress=False,
        **options,
    )  # fmt: skip
    assert_same_course(history.losses, expected, LOSS_TOLERANCE)
    assert_same_weights(model, twin, WEIGHT_TOLERANCE)


def test_holds_against_float64():
    x, y = problem("cross_entropy")
    model = network()
    twin = copy.deepcopy(model).double()
    expected = plain_loop(twin, x.double(), y, steps=MANY_STEPS, batch_size=BATCH, options=OPTIMIZERS["sgd"])
    history = ol.fit(
        model, x, y, steps=MANY_STEPS, batch_size=BATCH, optimizer="sgd", lr=0.1, engine="eager", progress=False
    )
    assert_same_course(history.losses, expected, LOSS_TOLERANCE)
    assert_same_weights(model, twin, WEIGHT_TOLERANCE)


def test_float64_models_train_in_float64():
    x, y = problem("mse")
    model = network().double()
    twin = copy.deepcopy(model)
    plain_loop(twin, x.double(), y.double(), steps=50, batch_size=BATCH, options=OPTIMIZERS["adam"], loss="mse")
    ol.fit(model, x, y, steps=50, batch_size=BATCH, loss="mse", engine="eager", progress=False, **OPTIMIZERS["adam"])
    assert_same_weights(model, twin, 1e-12)


@pytest.mark.parametrize("smoothing", [0.1, 1.0])
def test_label_smoothing(smoothing):
    x, y = problem("cross_entropy")
    model = network()
    twin = copy.deepcopy(model)
    options = OPTIMIZERS["sgd"]
    expected = plain_loop(twin, x, y, steps=50, batch_size=BATCH, options=options, label_smoothing=smoothing)
    history = ol.fit(
        model, x, y, steps=50, batch_size=BATCH, label_smoothing=smoothing, engine="eager", progress=False, **options
    )
    assert_same_course(history.losses, expected, LOSS_TOLERANCE)


def test_batch_norm_and_its_running_statistics():
    x, y = problem("cross_entropy")
    model = nn.Sequential(nn.Linear(7, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    twin = copy.deepcopy(model)
    expected = plain_loop(twin, x, y, steps=STEPS, batch_size=BATCH, options=OPTIMIZERS["adam"])
    history = ol.fit(model, x, y, steps=STEPS, batch_size=BATCH, engine="eager", progress=False, **OPTIMIZERS["adam"])
    assert_same_course(history.losses, expected, LOSS_TOLERANCE)
    assert_same_weights(model, twin, WEIGHT_TOLERANCE)
    assert model[1].num_batches_tracked == STEPS


class MaskedDropout(nn.Module):
    """Dropout by the definition in rng.py, for the hand-written loop."""

    def __init__(self, p: float, layer: int, seed: int) -> None:
        super().__init__()
        self.p, self.layer, self.seed, self.step = p, layer, seed, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keep = dropout_keep(self.p, self.seed, self.layer, self.step, x.shape[0], x.shape[1], device=x.device)
        self.step += 1
        return torch.where(keep, x / (1 - self.p), 0.0)


def test_dropout_masks_are_those_of_rng(device):
    x, y = (tensor.to(device) for tensor in problem("cross_entropy"))
    model = nn.Sequential(
        nn.Dropout(0.1), nn.Linear(7, 33), nn.ReLU(), nn.Dropout(0.5), nn.Linear(33, 4)
    ).to(device)  # fmt: skip
    twin = copy.deepcopy(model)
    twin[0], twin[3] = MaskedDropout(0.1, 0, seed=9), MaskedDropout(0.5, 1, seed=9)
    expected = plain_loop(twin, x, y, steps=STEPS, batch_size=BATCH, options=OPTIMIZERS["sgd"], seed=9)
    history = ol.fit(
        model,
        x,
        y,
        steps=STEPS,
        batch_size=BATCH,
        optimizer="sgd",
        lr=0.1,
        seed=9,
        engine="eager",
        precision="fp32",
        progress=False,
    )
    assert_same_course(history.losses, expected, LOSS_TOLERANCE)
    for got, reference in zip(model.parameters(), twin.parameters(), strict=True):
        assert (got - reference).abs().max() <= WEIGHT_TOLERANCE
    assert "forward" not in vars(model[0])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # from the compiler itself
def test_a_compiled_model_draws_the_same_masks():
    """Only dropout would need a kernel from inductor here, and all batches have one shape: the compiler has little to do."""
    x, y = problem("cross_entropy", rows=96)
    model = nn.Sequential(nn.Linear(7, 8, bias=False), nn.Dropout(0.9), nn.Linear(8, 4, bias=False))
    twin = copy.deepcopy(model)
    options = {"steps": 12, "batch_size": 16, "lr": 0.1, "seed": 9, "engine": "eager", "progress": False}
    expected = ol.fit(twin, x, y, **options).losses
    assert_same_course(ol.fit(torch.compile(model), x, y, **options).losses, expected, LOSS_TOLERANCE)
    assert_same_weights(model, twin, WEIGHT_TOLERANCE)


LOWER = [
    ("cpu", "bf16"),
    *(pytest.param("cuda", precision, marks=pytest.mark.gpu) for precision in ("tf32", "bf16", "fp16")),
]


@pytest.mark.parametrize(("where", "precision"), LOWER)
def test_lower_precisions_follow_fp32(where, precision):
    x, y = (tensor.to(where) for tensor in problem("cross_entropy", rows=500))
    model = network().to(where)
    twin = copy.deepcopy(model)
    expected = plain_loop(twin, x, y, steps=100, batch_size=BATCH, options=OPTIMIZERS["sgd"])
    history = ol.fit(
        model,
        x,
        y,
        steps=100,
        batch_size=BATCH,
        optimizer="sgd",
        lr=0.1,
        precision=precision,
        engine="eager",
        progress=False,
    )
    assert history.precision == precision
    gap = (torch.tensor(history.losses) - torch.tensor(expected)).abs().max()
    assert gap < 0.03  # the losses start at about 1.5
    assert_same_weights(model, twin, 0.02)
