"""Clipping by the global norm on the graph engine follows a loop in float64: in Triton's interpreter, or on a GPU."""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch

import onelaunch as ol
from onelaunch.engines.graph.kernels import run_arguments
from tests.conftest import LOSS_TOLERANCE, WEIGHT_TOLERANCE
from tests.engines.graph.harness import DEVICE, SHAPES, data, network, session, train, use_shape
from tests.reference import LOSSES, OPTIMIZERS, assert_same_course, assert_same_weights, weighted_loop

pytestmark = pytest.mark.usefixtures("one_thread")
WIDTHS = [7, 20, 12, 4]
CASES = list(enumerate(product(SHAPES, OPTIMIZERS)))


def use_many_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits the sum of squares among five programs, each with several blocks, and an update among many."""
    from onelaunch.engines.graph.kernels import clip

    monkeypatch.setattr(run_arguments, "SQUARES_PER_PROGRAM", 32)
    monkeypatch.setattr(run_arguments, "MAX_SQUARE_PROGRAMS", 5)
    monkeypatch.setattr(clip, "SQUARES_PER_PROGRAM", 32)
    monkeypatch.setattr(clip, "WEIGHTS_PER_PROGRAM", 128)


@pytest.mark.parametrize(("number", "shape", "optimizer"), [(number, *case) for number, case in CASES])
def test_follows_a_loop_in_float64(number, shape, optimizer, monkeypatch):
    """Every optimizer in every shape; every loss, and half of the runs with row weights. Several programs share the norm."""
    use_shape(shape, monkeypatch)
    use_many_programs(monkeypatch)
    torch.manual_seed(number)
    loss = list(LOSSES)[number % 3]
    batch, rows = (10, 25) if shape == "small" else (40, 90)  # three steps, the last with a short batch
    x, y = data(WIDTHS, loss, rows)
    weights = torch.rand(rows, device=DEVICE) * (torch.rand(rows, device=DEVICE) > 0.2) if number % 2 else None
    model = network(WIDTHS, "tanh", bias=number % 5 > 0)
    twin, unclipped = copy.deepcopy(model), copy.deepcopy(model)
    loop = {"steps": 3, "batch_size": batch, "options": OPTIMIZERS[optimizer], "loss": loss}
    given = torch.ones(rows, device=DEVICE) if weights is None else weights
    expected = weighted_loop(twin, x, y, given, clip_norm=0.02, **loop)
    options = {**OPTIMIZERS[optimizer], "steps": 3, "batch_size": batch, "loss": loss, "clip_norm": 0.02}
    losses, _ = train(model, x, y, options, sample_weight=weights)
    assert_same_course(losses.tolist(), expected, LOSS_TOLERANCE)
    assert_same_weights(model, twin, WEIGHT_TOLERANCE)
    weighted_loop(unclipped, x, y, given, **loop)
    gap = max((a - b).abs().max().item() for a, b in zip(unclipped.parameters(), twin.parameters(), strict=True))
    assert gap > 3 * WEIGHT_TOLERANCE, "the norm was below clip_norm"


@pytest.mark.parametrize(("shape", "widths"), [("small", [9, 4]), ("large", [9, 4]), ("small", [5, 20, 260, 3])])
def test_other_depths(shape, widths, monkeypatch):
    """A single Linear, and strips of columns that several programs share."""
    use_shape(shape, monkeypatch)
    x, y = data(widths, "cross_entropy", 30)
    model = network(widths, "gelu")
    twin = copy.deepcopy(model)
    expected = weighted_loop(
        twin, x, y, torch.ones(30, device=DEVICE), steps=2, batch_size=16, options=OPTIMIZERS["sgd"], clip_norm=0.1
    )
    losses, _ = train(model, x, y, {**OPTIMIZERS["sgd"], "steps": 2, "batch_size": 16, "clip_norm": 0.1})
    assert_same_course(losses.tolist(), expected, LOSS_TOLERANCE)
    assert_same_weights(model, twin, WEIGHT_TOLERANCE)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_norm_below_the_limit_changes_no_bit(shape, monkeypatch):
    use_shape(shape, monkeypatch)
    torch.manual_seed(0)
    x, y = data(WIDTHS, "cross_entropy")
    model = network(WIDTHS, "relu")
    twin = copy.deepcopy(model)
    options = {**OPTIMIZERS["adamw"], "steps": 2, "batch_size": 25}
    losses, _ = train(model, x, y, options | {"clip_norm": 1e6})
    assert torch.equal(losses, train(twin, x, y, options)[0])
    assert_same_weights(model, twin, 1e-6)  # sums of the small step may be added in another order


@pytest.mark.parametrize("shape", SHAPES)
def test_a_batch_without_weight_changes_nothing(shape, monkeypatch):
    use_shape(shape, monkeypatch)
    x, y = data(WIDTHS, "cross_entropy", 40)
    weights = torch.zeros(40)
    weights[ol.permutation(40, 0, 0)[20:]] = 1.0  # the first batch has none
    model = network(WIDTHS, "relu")
    before = copy.deepcopy(model)
    losses, _ = train(
        model, x, y, {"steps": 1, "batch_size": 20, "lr": 0.1, "clip_norm": 0.5}, sample_weight=weights.to(DEVICE)
    )
    assert losses.tolist() == [0.0]
    assert_same_weights(model, before, 0.0)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes with NumPy
@pytest.mark.parametrize("value", [0.0, 3.0, float("nan"), float("inf")])
def test_the_factor_is_that_of_clip_grad_norm(value, monkeypatch):
    from onelaunch.engines.graph.kernels.clip import clip_factor

    use_many_programs(monkeypatch)
    gradients = torch.randn(1000, device=DEVICE) * (value != 0)
    gradients[777] = value
    table = torch.zeros(2, run_arguments.TABLE_WIDTH, device=DEVICE)
    table[0, run_arguments.HYPER.index("clip_norm")] = 2.0
    table[1, run_arguments.SCALARS.index("row_weight")] = 0.25
    clock = run_arguments.Clock(torch.zeros(4, dtype=torch.int64, device=DEVICE), table, 0)
    squares = torch.full((run_arguments.square_programs(1000),), float("nan"), device=DEVICE)
    tickets = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    factor = torch.full((1,), float("nan"), device=DEVICE)
    for _ in range(2):  # tickets are not reset
        clip_factor(gradients, squares, tickets, factor, clock)
        parameter = torch.nn.Parameter(torch.zeros(1000, dtype=torch.float64))
        parameter.grad = gradients.cpu().double() / 4
        norm = torch.nn.utils.clip_grad_norm_([parameter], 2.0)
        expected = torch.clamp(2.0 / (norm + 1e-6), max=1.0).float().reshape(1)
        torch.testing.assert_close(factor.cpu(), expected, rtol=1e-6, atol=0.0, equal_nan=True)


def test_the_plan_names_the_kernels_of_clipping():
    x, y = data(WIDTHS, "cross_entropy")
    graph = session(network(WIDTHS, "relu"), x, y, {"steps": 1, "clip_norm": 0.5})
    assert "first_and_last_update 0, clip_factor, clipped_update 0, clipped_update 1, clipped_update 2)" in graph.plan
    graph.close()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("precision", "optimizer"), [("fp32", "sgd"), ("fp32", "adam"), ("tf32", "sgd"), ("bf16", "sgd"), ("fp16", "sgd")]
)
@pytest.mark.parametrize(
    ("batch", "widths"), [(32, [96, 256, 128, 10]), (500, [96, 256, 128, 10]), (700, [96, 64, 48, 10])]
)
def test_captured_runs_follow_eager(batch, widths, precision, optimizer):
    """Adam in fp32 only: it turns the sign of a small gradient, which rounding may change, into a whole step."""
    torch.manual_seed(0)
    x, y = torch.randn(3000, 96, device=DEVICE), torch.randint(10, (3000,), device=DEVICE)
    options = {
        **OPTIMIZERS[optimizer], "steps": 100, "batch_size": batch, "precision": precision, "clip_norm": 0.3,
        "sample_weight": torch.rand(3000), "progress": False,
    }  # fmt: skip
    model = network(widths, "tanh", 0.1 if widths[1] == 256 else 0.0)
    twin = copy.deepcopy(model)
    history = ol.fit(model, x, y, engine="graph", **options)
    expected = ol.fit(twin, x, y, engine="eager", **options)
    tolerance = {"fp32": LOSS_TOLERANCE, "tf32": 1e-2, "bf16": 4e-2, "fp16": 1e-2}[precision]
    torch.testing.assert_close(
        torch.tensor(history.losses), torch.tensor(expected.losses), rtol=tolerance, atol=tolerance
    )
    assert_same_weights(model, twin, WEIGHT_TOLERANCE if precision == "fp32" else 2e-2)
    assert history.allocations["in the last epoch"] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("memory", ["plan", "caching", "stream"])
@pytest.mark.parametrize("batch", [32, 500, 1000])
def test_the_same_bits_in_every_run_and_from_every_source_of_memory(batch, memory):
    torch.manual_seed(0)
    x, y = torch.randn(3000, 96, device=DEVICE), torch.randint(10, (3000,), device=DEVICE)
    widths = [96, 64, 48, 10] if batch == 1000 else [96, 520, 264, 10]
    model = network(widths, "gelu")
    runs = []
    for kind in ("plan", memory):
        one = copy.deepcopy(model)
        ol.fit(
            one, x, y, epochs=3, batch_size=batch, optimizer="adam", lr=0.01, engine="graph", precision="bf16",
            clip_norm=0.2, memory=kind, progress=False,
        )  # fmt: skip
        runs.append(torch.cat([p.detach().flatten() for p in one.parameters()]))
    assert torch.equal(*runs)
