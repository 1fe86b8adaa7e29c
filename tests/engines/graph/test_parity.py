"""Steps of every shape, with every activation and optimizer, follow the eager engine: in Triton's interpreter, or on a GPU."""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch

import onelaunch as ol
from onelaunch.activations import ACTIVATIONS
from onelaunch.optimizers import OPTIMIZERS as TABLE
from tests import pairwise
from tests.conftest import LOSS_TOLERANCE, WEIGHT_TOLERANCE
from tests.engines.graph.harness import DEVICE, SHAPES, assert_follows_eager, data, network, train, use_shape
from tests.reference import LOSSES, OPTIMIZERS, assert_same_weights

pytestmark = pytest.mark.usefixtures("one_thread")
WIDTHS = [7, 20, 12, 4]
SCHEDULES = ("constant", "linear", "cosine", "one_cycle")


def combinations() -> list[tuple[str, str, str, str, float, str, bool]]:
    """(shape, activation, optimizer, loss, p, schedule, validation): every shape meets every value of each other option.

    Activation, optimizer and loss are separate parts of the kernels, so that their pairs need no runs of their own.
    """
    if pairwise.ALL_CASES:
        return [
            (shape, activation, optimizer, loss, p, "constant", True)
            for shape, activation, optimizer, loss, p in product(SHAPES, ACTIVATIONS, OPTIMIZERS, LOSSES, (0.0, 0.3))
            if not (p and shape == "narrow")
        ]
    found = []
    for offset, shape in enumerate(SHAPES):
        for index, activation in enumerate(ACTIVATIONS):
            optimizer = list(OPTIMIZERS)[(index + offset) % len(OPTIMIZERS)]
            p = 0.3 * (index % 2) if shape != "narrow" else 0.0  # the narrow step has no dropout
            validation = index % 4 == 0
            found.append((shape, activation, optimizer, list(LOSSES)[index % 3], p, SCHEDULES[index // 3], validation))
    return found


def test_every_name_is_tested():
    cases = combinations()
    assert {case[1] for case in cases} == set(ACTIVATIONS)
    assert {OPTIMIZERS[case[2]]["optimizer"] for case in cases} == set(TABLE)
    assert {(case[0], case[2]) for case in cases} == set(product(SHAPES, OPTIMIZERS))
    assert {(case[0], case[3], case[6]) for case in cases if case[6]} == {
        (s, loss, True) for s in SHAPES for loss in LOSSES
    }


@pytest.mark.parametrize(
    ("shape", "activation", "optimizer", "loss", "p", "schedule", "validation"), combinations()
)  # fmt: skip
def test_follows_eager(shape, activation, optimizer, loss, p, schedule, validation, monkeypatch):
    torch.manual_seed(0)
    use_shape(shape, monkeypatch)
    batch, rows = (10, 17) if shape == "small" else (40, 65)  # two steps, the second with a short batch
    options = {**OPTIMIZERS[optimizer], "loss": loss, "schedule": schedule}
    options |= {"steps": 2, "batch_size": batch, "seed": 2**63 + 9}
    model = network(WIDTHS, activation, p)
    x, y = data(WIDTHS, loss, rows)
    assert_follows_eager(
        model, x, y, options, losses=LOSS_TOLERANCE, weights=WEIGHT_TOLERANCE, validation=validation
    )  # fmt: skip


@pytest.mark.parametrize(("shape", "widths"), [("small", [9, 4]), ("large", [9, 4]), ("small", [5, 8, 8, 8, 2])])
def test_depths_uint8_rows_and_no_bias(shape, widths, monkeypatch):
    """Three steps, so that the second epoch's row order is used too."""
    use_shape(shape, monkeypatch)
    options = {"steps": 3, "batch_size": 24, "lr": 0.1, "label_smoothing": 0.1}
    model = network(widths, None, bias=False)
    x, y = data(widths, "cross_entropy", 40, uint8_rows=True)
    assert_follows_eager(model, x, y, options, losses=LOSS_TOLERANCE, weights=WEIGHT_TOLERANCE)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize(
    ("batch", "widths"), [(32, [96, 256, 128, 10]), (500, [96, 256, 128, 10]), (700, [96, 64, 48, 10])]
)
def test_captured_runs_follow_eager(precision, batch, widths):
    """The whole engine with graphs, at sizes where every kind of tile is in use."""
    torch.manual_seed(0)
    x, y = torch.randn(3000, 96, device=DEVICE), torch.randint(10, (3000,), device=DEVICE)
    options = {
        "steps": 200,
        "batch_size": batch,
        "optimizer": "sgd",
        "lr": 0.05,
        "precision": precision,
        "progress": False,
    }
    p = 0.1 if widths[1] == 256 else 0.0  # the narrow step has no dropout
    model, twin = network(widths, "relu", p), network(widths, "relu", p)
    twin.load_state_dict(model.state_dict())
    history = ol.fit(model, x, y, engine="graph", validation=(x[:500], y[:500]), **options)
    expected = ol.fit(twin, x, y, engine="eager", validation=(x[:500], y[:500]), **options)
    tolerance = {"fp32": LOSS_TOLERANCE, "tf32": 1e-2, "bf16": 4e-2, "fp16": 1e-2}[precision]
    torch.testing.assert_close(
        torch.tensor(history.losses), torch.tensor(expected.losses), rtol=tolerance, atol=tolerance
    )
    assert_same_weights(model, twin, WEIGHT_TOLERANCE if precision == "fp32" else 2e-2)
    assert history.allocations["in the last epoch"] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(("shape", "activation", "optimizer"), [case[:3] for case in combinations()])
def test_every_name_in_16_bits(shape, activation, optimizer, precision):
    """Products in 16 bits. Rounding may turn the sign of a small gradient, which lion and adam turn into a whole step."""
    torch.manual_seed(0)
    widths = [96, 64, 48, 10] if shape == "narrow" else [96, 256, 128, 10]
    batch = {"small": 32, "large": 500, "narrow": 700}[shape]
    x, y = torch.randn(3000, 96, device=DEVICE), torch.randint(10, (3000,), device=DEVICE)
    options = {**OPTIMIZERS[optimizer], "steps": 10, "batch_size": batch, "precision": precision, "progress": False}
    model, twin, before = (network(widths, activation) for _ in range(3))
    for copied in (model, twin):
        copied.load_state_dict(before.state_dict())
    history = ol.fit(model, x, y, engine="graph", **options)
    expected = ol.fit(twin, x, y, engine="eager", **options)
    tolerance = {"bf16": 4e-2, "fp16": 1e-2}[precision]
    torch.testing.assert_close(
        torch.tensor(history.losses), torch.tensor(expected.losses), rtol=tolerance, atol=tolerance
    )
    got, want, start = (
        torch.cat([parameter.detach().flatten() for parameter in one.parameters()]) for one in (model, twin, before)
    )
    assert (got - want).norm() <= 0.5 * (want - start).norm()


@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
@pytest.mark.parametrize("shape", SHAPES)
def test_row_weights_follow_eager(shape, loss, monkeypatch):
    use_shape(shape, monkeypatch)
    torch.manual_seed(0)
    widths = [9, 16, 16, 5]
    x, y = data(widths, loss, 30)
    weights = torch.rand(30) * (torch.rand(30) > 0.3)
    model = network(widths, "relu")
    twin = copy.deepcopy(model)
    options = {"epochs": 2, "batch_size": 8, "lr": 0.1, "optimizer": "sgd", "loss": loss, "precision": "fp32"}
    expected = ol.fit(twin, x, y, engine="eager", sample_weight=weights, progress=False, **options)
    got, segments = train(model, x, y, options, sample_weight=weights)
    torch.testing.assert_close(got, torch.tensor(expected.losses), rtol=LOSS_TOLERANCE, atol=LOSS_TOLERANCE)
    assert_same_weights(model, twin, WEIGHT_TOLERANCE)
    sums = torch.cat([weights[rows].double().sum()[None] for rows in ol.permutation(30, 0, 1).split(8)])
    torch.testing.assert_close(segments[1].weights, sums)
