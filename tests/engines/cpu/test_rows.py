"""Partitions that take their rows of the batch through the whole step, against plain PyTorch in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from onelaunch.activations import ACTIVATIONS
from onelaunch.bench.workload import Residual
from onelaunch.engines.contract import Run, State
from onelaunch.engines.cpu.code.kernel import Unit
from onelaunch.engines.cpu.code.optimizer import UpdateRule
from onelaunch.engines.cpu.code.units import text_of
from onelaunch.engines.cpu.native import machine_for, object_code
from onelaunch.engines.cpu.plan.plan import Plan
from onelaunch.engines.cpu.plan.target import Target, host, named
from onelaunch.engines.cpu.session import CpuSession, settings_for
from onelaunch.run.spec import LOSSES
from onelaunch.train.inputs import make_run
from tests.conftest import LOSS_TOLERANCE, WEIGHT_TOLERANCE
from tests.engines.cpu.native_functions import runnable_targets
from tests.engines.cpu.runs import Bystander, Course, assert_close, copy_of, data, make, train_natively, train_plainly
from tests.pairwise import cases
from tests.reference import OPTIMIZERS, assert_same_course, assert_same_weights, weighted_loop

NAMES = tuple(ACTIVATIONS)
GROUPS = (NAMES[::2], NAMES[1::2])
LION_RATE = 2e-5  # rounding may flip the sign of an update, which then stays within the tolerance of the weights
# Two partitions of 32 and 43 rows; the last batch of an epoch has 40, so that the second has 8 rows then.
ROWS, BATCH = 190, 75


def train(run: Run, cache_folder: Path, partitions: int = 2, target: Target | None = None) -> Course:
    """The run in native code, by rows."""
    assert Plan(settings_for(run, partitions), target or host()).by_rows
    return train_natively(run, cache_folder, partitions=partitions, target=target)


@pytest.mark.parametrize(("optimizer", "loss", "activations"), cases(tuple(OPTIMIZERS), LOSSES, GROUPS))
def test_200_steps_follow_plain_pytorch(
    optimizer: str, loss: str, activations: tuple[str, ...], cache_folder: Path
) -> None:
    options = dict(OPTIMIZERS[optimizer])
    if options["optimizer"] == "lion":
        options["lr"] = LION_RATE
    x, y = data(loss, ROWS, 12, 4)
    for seed in range(1, 6):
        torch.manual_seed(seed)
        layers = [module for name in activations for module in (nn.Linear(12, 12), ACTIVATIONS[name].make_module())]
        model = nn.Sequential(*layers, nn.Linear(12, 4))
        run = make(model, x, y, loss=loss, steps=200, batch_size=BATCH, **options)
        reference = train_plainly(run)
        if follows(train_plainly(run, torch.float32), reference):
            break
    ours = train(run, cache_folder)
    assert_close(ours, reference)
    assert ours.correct == reference.correct


def follows(course: Course, reference: Course) -> bool:
    """Whether PyTorch's own float32 does: else a value lies at the kink of an activation, where rounding decides."""
    try:
        assert_close(course, reference)
    except AssertionError:
        return False
    return True


class Dense(nn.Module):
    """Additions of the same value twice, of a value inside a stage, and of the input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(width, width) for _ in range(3))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.first(x)
        b = torch.tanh(a)
        c = a + torch.relu(self.second(b) + b)
        return torch.nn.functional.gelu(self.norm(self.third(c) + a) + x)


# Layers, rows, batch, outputs, partitions. Widths change from layer to layer, since layers share the memory of dX.
NETWORKS: dict[str, tuple[Callable[[], list[nn.Module]], int, int, int, int]] = {
    "dropout, from the input on": (
        lambda: [nn.Dropout(0.1), nn.Linear(9, 50), nn.Tanh(), nn.Dropout(0.5), nn.Linear(50, 33), nn.ReLU(), nn.Dropout(0.3),
                 nn.Linear(33, 20), nn.Dropout(0.2), nn.Linear(20, 5), nn.Dropout(0.05)], 190, 75, 5, 2,
    ),
    "layer norms, also first and last": (
        lambda: [nn.LayerNorm(9), nn.Linear(9, 40), nn.LayerNorm(40), nn.ReLU(), nn.Linear(40, 33), nn.ReLU(),
                 nn.LayerNorm(33, elementwise_affine=False), nn.Linear(33, 17), nn.LayerNorm(17), nn.Tanh()], 150, 65, 17, 2,
    ),
    "residual, pre-norm": (
        lambda: [nn.Linear(9, 40), Residual(nn.LayerNorm(40), nn.Linear(40, 70), nn.GELU(), nn.Linear(70, 40)),
                 Residual(nn.Linear(40, 40), nn.ReLU()), nn.LayerNorm(40), nn.Linear(40, 3)], 300, 127, 3, 3,
    ),
    "additions inside a stage and from the input": (lambda: [nn.LayerNorm(9), Dense(9), nn.Linear(9, 3)], 150, 64, 3, 2),
    "activation of the input, linear after linear": (
        lambda: [nn.SiLU(), nn.Linear(9, 40), nn.Linear(40, 70), nn.Linear(70, 10), nn.Sigmoid()], 260, 130, 10, 4,
    ),
    "many classes, without bias": (
        lambda: [nn.Linear(9, 60, bias=False), nn.Tanh(), nn.Linear(60, 20, bias=False), nn.Tanh(), nn.Linear(20, 90)],
        200, 99, 90, 3,
    ),
    "a batch larger than the data": (lambda: [nn.Linear(9, 33), nn.GELU(), nn.Linear(33, 3)], 100, 500, 3, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", NETWORKS)
def test_every_shape_follows_plain_pytorch(name: str, cache_folder: Path) -> None:
    layers, rows, batch, outputs, partitions = NETWORKS[name]
    torch.manual_seed(2)
    x, y = data("cross_entropy", rows, 9, outputs)
    run = make(nn.Sequential(*layers()), x, y, (x[:50], y[:50]), steps=60, batch_size=batch, momentum=0.9)
    assert run.network is not None, run.no_network_reason
    ours, reference = train(run, cache_folder, partitions), train_plainly(run)
    assert_close(ours, reference)
    assert ours.correct == reference.correct
    assert ours.accuracy == reference.accuracy


@pytest.mark.parametrize("target", runnable_targets(), ids=lambda target: target.cpu)
@pytest.mark.parametrize("optimizer", ["sgd-nesterov", "adamw"])
def test_narrower_vectors_and_bytes(target: Target, optimizer: str, cache_folder: Path) -> None:
    """uint8 rows mean value / 255."""
    torch.manual_seed(0)
    x, y = torch.randint(0, 256, (ROWS, 21), dtype=torch.uint8), torch.randint(0, 5, (ROWS,))
    model = nn.Sequential(nn.Linear(21, 40), nn.LayerNorm(40), nn.GELU(), nn.Dropout(0.3), nn.Linear(40, 5))
    run = make(model, x, y, (x, y), steps=40, batch_size=BATCH, label_smoothing=0.1, **OPTIMIZERS[optimizer])
    assert_close(train(run, cache_folder, target=target), train_plainly(run))


@pytest.mark.parametrize(("loss", "outputs"), [("cross_entropy", 4), ("cross_entropy", 40), ("mse", 5)])
def test_weighted_rows(loss: str, outputs: int, cache_folder: Path) -> None:
    torch.manual_seed(0)
    x, y = data(loss, ROWS, 7, outputs)
    weights = torch.rand(ROWS) * (torch.rand(ROWS) > 0.2)
    model = nn.Sequential(nn.Linear(7, 20), nn.Tanh(), nn.Linear(20, 33), nn.GELU(), nn.Linear(33, outputs))
    options = {**OPTIMIZERS["sgd-momentum"], "loss": loss, "steps": 100, "batch_size": BATCH}
    run = make_run(model, x, y, None, options, sample_weight=weights)
    twin = copy.deepcopy(model)
    reference = OPTIMIZERS["sgd-momentum"]
    expected = weighted_loop(twin, x, y, weights, steps=100, batch_size=BATCH, options=reference, loss=loss)
    ours = train(run, cache_folder)
    assert_same_course(ours.losses.tolist(), expected, LOSS_TOLERANCE)
    assert_same_weights(ours.model, twin, WEIGHT_TOLERANCE)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_every_partition_has_the_same_parameters_and_states(optimizer: str, cache_folder: Path) -> None:
    """Also after a resume, which has the bits of a run that never stopped."""
    torch.manual_seed(0)
    x, y = data("cross_entropy", ROWS, 9, 3)
    model = nn.Sequential(
        nn.Linear(9, 40), nn.LayerNorm(40), nn.ReLU(), nn.Linear(40, 33), nn.LayerNorm(33), nn.Linear(33, 3)
    )
    run = make(model, x, y, epochs=4, batch_size=BATCH, optimizer=optimizer)
    whole = train(run, cache_folder)
    own, state = copy_of(run), State()
    for first in (0, 6):  # of 12 steps
        session = CpuSession(own, state, cache_folder=cache_folder, partitions=2)
        session.team.note = lambda seconds: None  # type: ignore[method-assign, assignment]
        session.team.uses_threads = True
        plan, states = session.program.plan, len(session.program.plan.settings.state_names)
        assert plan.private_weights
        segments = session.segments(first, Bystander())
        losses = [next(segments).losses for _ in range(2)]
        assert torch.equal(torch.cat(losses), whole.losses[first : first + 6].float())
        copies = session.arena.view("parameters").reshape(-1, plan.state_stride // 4)[: 2 * (1 + states)]
        assert (copies[: 1 + states] == copies[1 + states :]).all()
        assert copies.any(axis=1).all()
        state = session.snapshot()
        session.close()
    assert_same_weights(own.model, whole.model, 0)


def test_nan_is_not_hidden(cache_folder: Path) -> None:
    """Whichever partition has the row."""
    x, y = data("cross_entropy", 64, 7, 3)
    run = make(nn.Sequential(nn.Linear(7, 20), nn.ReLU(), nn.Linear(20, 3)), x, y, steps=2, batch_size=64)
    run.x[int(torch.randint(64, ()))] = torch.nan
    assert train(run, cache_folder).losses.isnan().all()


@pytest.mark.parametrize("triple", ["aarch64-unknown-linux-gnu", "arm64-apple-macosx", "x86_64-pc-windows-msvc"])
def test_the_update_compiles_for_other_machines(triple: str) -> None:
    target = named(triple)
    text = text_of(Unit("summed_update", (UpdateRule("adam"),)), target)
    assert len(object_code(text, machine_for(target, foreign=True))) > 500
