"""The engine against plain PyTorch in float64: every optimizer, loss and activation, odd sizes, dropout, BatchNorm1d."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from onelaunch.activations import ACTIVATIONS
from onelaunch.engines.contract import Run
from onelaunch.run.spec import LOSSES
from tests.engines.cpu.runs import assert_close, assert_same_bits, data, make, train_natively, train_plainly
from tests.pairwise import cases
from tests.reference import OPTIMIZERS

# Several activations per network: code generation takes most of a test's time, and a further layer adds little.
NAMES = tuple(ACTIVATIONS)
GROUPS = (NAMES[::2], NAMES[1::2])
# Rounding may flip the sign of a Lion update. At this rate a flipped step stays within the tolerance of the weights.
LION_RATE = 2e-5


def network_with(activations: tuple[str, ...]) -> nn.Sequential:
    torch.manual_seed(1)
    layers: list[nn.Module] = []
    for name in activations:
        module = nn.LeakyReLU(0.2) if name == "leaky_relu" else ACTIVATIONS[name].make_module()
        layers += [nn.Linear(12, 12), module]
    return nn.Sequential(*layers, nn.Linear(12, 4))


def run_with(optimizer: str, loss: str, activations: tuple[str, ...], steps: int) -> Run:
    x, y = data(loss, 150, 12, 4)
    options = dict(OPTIMIZERS[optimizer])
    if options["optimizer"] == "lion":
        options["lr"] = LION_RATE
    return make(network_with(activations), x, y, loss=loss, steps=steps, **options)


@pytest.mark.parametrize(("optimizer", "loss", "activations"), cases(tuple(OPTIMIZERS), LOSSES, GROUPS))
def test_200_steps_follow_plain_pytorch(
    optimizer: str, loss: str, activations: tuple[str, ...], cache_folder: Path
) -> None:
    run = run_with(optimizer, loss, activations, steps=200)
    ours, reference = train_natively(run, cache_folder), train_plainly(run)
    assert_close(ours, reference)
    assert ours.correct == reference.correct


@pytest.mark.parametrize("activations", GROUPS)
def test_nan_is_not_hidden(activations: tuple[str, ...], cache_folder: Path) -> None:
    run = run_with("sgd", "cross_entropy", activations, steps=2)
    with torch.no_grad():
        next(run.model.parameters())[7, 2] = torch.nan
    assert train_natively(run, cache_folder).losses.isnan().any()


ODD: dict[str, tuple[list[nn.Module], int, int, int]] = {  # layers, rows, batch, outputs
    "one linear": ([nn.Linear(7, 3)], 40, 8, 3),
    "one linear, one output": ([nn.Linear(5, 1)], 40, 8, 1),
    "one unit wide, batch of one": (
        [nn.Linear(1, 1), nn.Tanh(), nn.Linear(1, 33), nn.SiLU(), nn.Linear(33, 1), nn.Tanh(), nn.Linear(1, 3)], 20, 1, 3,
    ),
    "no bias, 37 rows, batch 16": (
        [nn.Linear(9, 20, bias=False), nn.Tanh(), nn.Linear(20, 5, bias=False)], 37, 16, 5,
    ),
    "batch larger than the data": ([nn.Linear(6, 17), nn.GELU(), nn.Linear(17, 3)], 37, 64, 3),
    "1000 classes": ([nn.Linear(20, 40), nn.Sigmoid(), nn.Linear(40, 1000)], 64, 32, 1000),
    "activations first, last and in a row; linear after linear": (
        [nn.Tanh(), nn.Linear(8, 40), nn.Tanh(), nn.SiLU(), nn.Linear(40, 70), nn.Linear(70, 10), nn.Sigmoid()], 64, 33, 10,
    ),
}  # fmt: skip


@pytest.mark.parametrize("partitions", [1, 2])
@pytest.mark.parametrize("name", ODD)
def test_odd_sizes(name: str, partitions: int, cache_folder: Path) -> None:
    layers, rows, batch, outputs = ODD[name]
    torch.manual_seed(0)
    model = nn.Sequential(*layers)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    inputs = next(layer.in_features for layer in layers if isinstance(layer, nn.Linear))
    loss = "mse" if outputs == 1 else "cross_entropy"
    x, y = data(loss, rows, inputs, outputs)
    run = make(model, x, y, (x[:19], y[:19]), loss=loss, steps=60, batch_size=batch, schedule="cosine")
    assert_close(train_natively(run, cache_folder, partitions=partitions), train_plainly(run))


BATCH_NORMS: dict[str, tuple[nn.Module, ...]] = {
    "first, cumulative average, not affine": (
        nn.BatchNorm1d(9), nn.Linear(9, 40), nn.Tanh(), nn.BatchNorm1d(40, momentum=None), nn.SiLU(), nn.Dropout(0.25),
        nn.Linear(40, 37), nn.BatchNorm1d(37, affine=False), nn.GELU(), nn.Linear(37, 6),
    ),
    "twice in a row, no running statistics, last": (
        nn.Linear(9, 20), nn.Tanh(), nn.BatchNorm1d(20), nn.BatchNorm1d(20, track_running_stats=False), nn.SiLU(),
        nn.Linear(20, 6), nn.BatchNorm1d(6), nn.Tanh(),
    ),
    "before an activation of the input": (nn.BatchNorm1d(9), nn.GELU(), nn.Linear(9, 20), nn.Tanh(), nn.Linear(20, 6)),
    "last, no running statistics": (nn.Linear(9, 6), nn.BatchNorm1d(6, track_running_stats=False)),
}  # fmt: skip


@pytest.mark.parametrize("partitions", [1, 2])
@pytest.mark.parametrize("name", BATCH_NORMS)
def test_batch_norm(name: str, partitions: int, cache_folder: Path) -> None:
    torch.manual_seed(0)
    x, y = data("cross_entropy", 90, 9, 6)
    # Not Adam: the gradient of a bias before a BatchNorm1d is rounding only, which Adam scales up to full steps.
    model = nn.Sequential(*BATCH_NORMS[name])
    run = make(model, x, y, (x[:33], y[:33]), steps=60, batch_size=32, momentum=0.9, weight_decay=1e-3)
    assert_close(train_natively(run, cache_folder, partitions=partitions), train_plainly(run))


@pytest.mark.parametrize("partitions", [1, 2])
@pytest.mark.parametrize("p", [0.5, 1.0])
def test_dropout_draws_the_masks_of_rng(p: float, partitions: int, cache_folder: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Dropout(0.1), nn.Linear(21, 70), nn.Tanh(), nn.Dropout(p), nn.Linear(70, 33), nn.ReLU(), nn.Dropout(0.3),
        nn.Linear(33, 20), nn.Dropout(0.2), nn.Linear(20, 5), nn.Dropout(0.05),
    )  # fmt: skip
    x, y = data("cross_entropy", 70, 21, 5)
    run = make(model, x, y, (x, y), steps=40, batch_size=32, seed=2**63 + 11)
    assert_close(train_natively(run, cache_folder, partitions=partitions), train_plainly(run))


@pytest.mark.parametrize(("shape", "classes"), [((5,), 1), ((4, 16), 3), ((4, 25), 40), ((8,), 90)])
def test_label_smoothing_of_uint8_rows(shape: tuple[int, ...], classes: int, cache_folder: Path) -> None:
    """uint8 rows mean value / 255."""
    torch.manual_seed(0)
    x = torch.randint(0, 256, (50, *shape), dtype=torch.uint8)
    y = torch.randint(0, classes, (50,))
    model = nn.Sequential(nn.Flatten(), nn.Linear(x[0].numel(), 20), nn.Tanh(), nn.Linear(20, classes))
    run = make(model, x, y, (x[:19], y[:19]), steps=30, label_smoothing=0.15, optimizer="adam", lr=0.01)
    ours, reference = train_natively(run, cache_folder), train_plainly(run)
    assert_close(ours, reference)
    assert ours.accuracy == reference.accuracy


@pytest.mark.parametrize("schedule", ["linear", "cosine", "one_cycle"])
def test_schedules(schedule: str, cache_folder: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 12), nn.Tanh(), nn.Linear(12, 4))
    x, y = data("mse", 50, 7, 4)
    run = make(model, x, y, loss="mse", epochs=7, schedule=schedule, optimizer="adamw", weight_decay=0.1, lr=0.01)
    assert_close(train_natively(run, cache_folder), train_plainly(run))


def test_the_first_of_equal_outputs_is_the_prediction(cache_folder: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 50))
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    y = torch.arange(32) % 4
    run = make(model, torch.zeros(32, 4), y, steps=1, batch_size=32, lr=0.0)
    assert train_natively(run, cache_folder).correct == 8


def test_a_wide_network_in_two_partitions(cache_folder: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(200, 150), nn.Tanh(), nn.Linear(150, 130), nn.Tanh(), nn.Linear(130, 10))
    x, y = data("cross_entropy", 300, 200, 10)
    run = make(model, x, y, (x, y), steps=200, batch_size=64, lr=0.1)
    reference = train_plainly(run)
    for partitions in (1, 2):
        ours = train_natively(run, cache_folder, partitions=partitions)
        assert_close(ours, reference)
        assert_same_bits(ours, train_natively(run, cache_folder, partitions=partitions))
