"""The engine against plain PyTorch: every optimizer, loss and activation, odd sizes, masks, norms, any number of shares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from onelaunch.engines.cpu.plan.settings import Settings
from tests.conftest import LOSS_TOLERANCE, WEIGHT_TOLERANCE
from tests.engines.cpu.runs import assert_close, assert_same_bits, data, make, train_natively, train_plainly
from tests.reference import OPTIMIZERS

ACTIVATIONS: dict[str, Any] = {
    "relu": nn.ReLU,
    "leaky_relu": lambda: nn.LeakyReLU(0.2),
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU(approximate="tanh"),
    "silu": nn.SiLU,
}
LOSSES = ("cross_entropy", "mse", "bce_with_logits")


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_200_steps_follow_plain_pytorch(optimizer: str, loss: str, activation: str, place: Path) -> None:
    # Seed 1: no unit passes so close to the kink of a relu that float32 and float64 disagree on its side.
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(7, 12), ACTIVATIONS[activation](), nn.Linear(12, 4))
    x, y = data(loss, 150, 7, 4)
    run = make(model, x, y, loss=loss, steps=200, **OPTIMIZERS[optimizer])
    ours, reference = train_natively(run, place), train_plainly(run)
    assert_close(ours, reference, losses=LOSS_TOLERANCE, weights=WEIGHT_TOLERANCE)
    assert ours.correct == reference.correct


ODD: dict[str, tuple[list[nn.Module], int, int, int]] = {  # layers, rows, batch, outputs
    "one linear alone": ([nn.Linear(7, 3)], 40, 8, 3),
    "one linear, one output": ([nn.Linear(5, 1)], 40, 8, 1),
    "no bias": ([nn.Linear(9, 20, bias=False), nn.Tanh(), nn.Linear(20, 5, bias=False)], 40, 8, 5),
    "layers one unit wide": ([nn.Linear(1, 1), nn.Tanh(), nn.Linear(1, 1), nn.Tanh(), nn.Linear(1, 3)], 40, 8, 3),
    "batch of one": ([nn.Linear(6, 33), nn.SiLU(), nn.Linear(33, 3)], 20, 1, 3),
    "37 rows, batch 16": ([nn.Linear(6, 17), nn.SiLU(), nn.Linear(17, 3)], 37, 16, 3),
    "batch larger than the data": ([nn.Linear(6, 17), nn.GELU(), nn.Linear(17, 3)], 37, 64, 3),
    "1000 classes": ([nn.Linear(20, 40), nn.Sigmoid(), nn.Linear(40, 1000)], 64, 32, 1000),
    "linear after linear": ([nn.Linear(20, 40), nn.Linear(40, 70), nn.Linear(70, 10)], 64, 33, 10),
    "ends in an activation": ([nn.Linear(20, 40), nn.Tanh(), nn.Linear(40, 10), nn.Sigmoid()], 64, 32, 10),
    "two activations in a row": ([nn.Linear(8, 40), nn.Tanh(), nn.SiLU(), nn.Linear(40, 10)], 64, 32, 10),
    "activation first": ([nn.Tanh(), nn.Linear(8, 40), nn.SiLU(), nn.Linear(40, 10)], 64, 32, 10),
}


@pytest.mark.parametrize("shares", [1, 2])
@pytest.mark.parametrize("name", ODD)
def test_odd_sizes(name: str, shares: int, place: Path) -> None:
    layers, rows, batch, outputs = ODD[name]
    torch.manual_seed(0)
    model = nn.Sequential(*layers)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    inputs = next(layer.in_features for layer in layers if isinstance(layer, nn.Linear))
    loss = "mse" if outputs == 1 else "cross_entropy"
    x, y = data(loss, rows, inputs, outputs)
    run = make(model, x, y, (x[:19], y[:19]), loss=loss, steps=60, batch_size=batch, schedule="cosine")
    assert_close(
        train_natively(run, place, shares=shares), train_plainly(run), losses=LOSS_TOLERANCE, weights=WEIGHT_TOLERANCE
    )


def _with_norms(**options: Any) -> nn.Sequential:
    return nn.Sequential(
        nn.BatchNorm1d(9), nn.Linear(9, 40), nn.Tanh(), nn.BatchNorm1d(40, **options), nn.SiLU(), nn.Dropout(0.25),
        nn.Linear(40, 37), nn.BatchNorm1d(37, affine=False), nn.GELU(), nn.Linear(37, 6),
    )  # fmt: skip


NORMS: dict[str, nn.Sequential] = {
    "plain": _with_norms(),
    "cumulative average": _with_norms(momentum=None),
    "no running statistics": _with_norms(track_running_stats=False),
    "after the last linear": nn.Sequential(nn.Linear(9, 20), nn.Tanh(), nn.Linear(20, 6), nn.BatchNorm1d(6), nn.Tanh()),
    "twice in a row": nn.Sequential(
        nn.Linear(9, 20), nn.BatchNorm1d(20), nn.BatchNorm1d(20), nn.Tanh(), nn.Linear(20, 6)
    ),
}


@pytest.mark.parametrize("shares", [1, 2])
@pytest.mark.parametrize("name", NORMS)
def test_batch_norm(name: str, shares: int, place: Path) -> None:
    torch.manual_seed(0)
    x, y = data("cross_entropy", 90, 9, 6)
    # Not Adam: the bias of a Linear before a norm has no gradient but rounding, which Adam scales up to full steps.
    run = make(NORMS[name], x, y, (x[:33], y[:33]), steps=60, batch_size=32, momentum=0.9, weight_decay=1e-3)
    reference = train_plainly(run)
    assert_close(train_natively(run, place, shares=shares), reference, losses=LOSS_TOLERANCE, weights=WEIGHT_TOLERANCE)


@pytest.mark.parametrize("shares", [1, 2])
@pytest.mark.parametrize("p", [0.1, 0.5, 1.0])
def test_dropout_draws_the_masks_of_rng(p: float, shares: int, place: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Dropout(0.1), nn.Linear(21, 70), nn.Tanh(), nn.Dropout(p), nn.Linear(70, 33), nn.ReLU(), nn.Dropout(0.3),
        nn.Linear(33, 20), nn.Dropout(0.2), nn.Linear(20, 5), nn.Dropout(0.05),
    )  # fmt: skip
    x, y = data("cross_entropy", 70, 21, 5)
    run = make(model, x, y, (x, y), steps=40, batch_size=32, seed=2**63 + 11)
    assert_close(
        train_natively(run, place, shares=shares), train_plainly(run), losses=LOSS_TOLERANCE, weights=WEIGHT_TOLERANCE
    )


@pytest.mark.parametrize("inputs", [5, 64, 100])
def test_bytes_mean_value_over_255(inputs: int, place: Path) -> None:
    torch.manual_seed(0)
    x = torch.randint(0, 256, (50, 4, inputs // 4 if inputs % 4 == 0 else 1), dtype=torch.uint8)
    x = x if inputs % 4 == 0 else torch.randint(0, 256, (50, inputs), dtype=torch.uint8)
    model = nn.Sequential(nn.Flatten(), nn.Linear(inputs, 20), nn.Tanh(), nn.Linear(20, 3))
    run = make(model, x, torch.randint(0, 3, (50,)), (x[:9], torch.zeros(9, dtype=torch.int64)), steps=30)
    assert_close(train_natively(run, place), train_plainly(run), losses=LOSS_TOLERANCE, weights=WEIGHT_TOLERANCE)


@pytest.mark.parametrize("classes", [1, 3, 40, 90])
def test_label_smoothing(classes: int, place: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 20), nn.Tanh(), nn.Linear(20, classes))
    x, y = data("cross_entropy", 50, 8, classes)
    run = make(model, x, y, (x, y), steps=30, label_smoothing=0.15, optimizer="adam", lr=0.01)
    ours, reference = train_natively(run, place), train_plainly(run)
    assert_close(ours, reference, losses=LOSS_TOLERANCE, weights=WEIGHT_TOLERANCE)
    assert ours.accuracy == reference.accuracy


@pytest.mark.parametrize("schedule", ["linear", "cosine", "one_cycle"])
def test_schedules(schedule: str, place: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 12), nn.Tanh(), nn.Linear(12, 4))
    x, y = data("mse", 50, 7, 4)
    run = make(model, x, y, loss="mse", epochs=7, schedule=schedule, optimizer="adamw", weight_decay=0.1, lr=0.01)
    assert_close(train_natively(run, place), train_plainly(run), losses=LOSS_TOLERANCE, weights=WEIGHT_TOLERANCE)


def test_the_first_of_equal_outputs_is_the_prediction(place: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 50))
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    y = torch.arange(32) % 4
    run = make(model, torch.zeros(32, 4), y, steps=1, batch_size=32, lr=0.0)
    assert train_natively(run, place).correct == 8


@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "tanh", "gelu", "sigmoid", "silu", "gelu_tanh"])
def test_nan_is_not_hidden(activation: str, place: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 20), ACTIVATIONS[activation](), nn.Linear(20, 3))
    with torch.no_grad():
        next(model.parameters())[7, 2] = torch.nan
    x, y = data("cross_entropy", 16, 6, 3)
    assert train_natively(make(model, x, y, steps=2), place).losses.isnan().any()


def test_a_wide_network_on_two_shares(place: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(200, 150), nn.Tanh(), nn.Linear(150, 130), nn.Tanh(), nn.Linear(130, 10))
    x, y = data("cross_entropy", 300, 200, 10)
    run = make(model, x, y, (x, y), steps=200, batch_size=64, lr=0.1)
    reference = train_plainly(run)
    for shares in (1, 2):
        ours = train_natively(run, place, shares=shares)
        assert_close(ours, reference, losses=LOSS_TOLERANCE, weights=WEIGHT_TOLERANCE)
        assert_same_bits(ours, train_natively(run, place, shares=shares))


def test_settings_hold_all_that_the_code_depends_on() -> None:
    """What changes from run to run without new code: a search over these costs no compilation."""
    fields = set(Settings.__dataclass_fields__)
    assert not fields & {"lr", "betas", "eps", "seed", "rows", "schedule", "label_smoothing"}
