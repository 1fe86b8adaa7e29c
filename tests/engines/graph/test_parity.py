"""The graph engine follows the eager engine step by step: its kernels in Triton's interpreter, or on a GPU."""

from __future__ import annotations

import pytest
import torch

import onelaunch as ol
from onelaunch.engines.graph.plan import narrow, plan
from tests.conftest import LOSS_TOLERANCE, WEIGHT_TOLERANCE
from tests.engines.graph.harness import DEVICE, Silent, assert_follows_eager, data, network, session
from tests.reference import OPTIMIZERS, assert_same_weights

pytestmark = pytest.mark.usefixtures("one_thread")
WIDTHS = [7, 20, 12, 4]


def use_large_steps(monkeypatch):
    """The shape of step for large batches, at a size the interpreter can do."""
    monkeypatch.setattr(plan, "SMALL_BATCH", 0)
    monkeypatch.setattr(plan, "ROWS_OF_A_PART", 8)


@pytest.mark.parametrize(
    ("shape", "optimizer", "loss", "activation", "p", "schedule"),
    [
        ("small", "sgd", "cross_entropy", "relu", 0.0, "constant"),
        ("small", "sgd-momentum", "cross_entropy", "relu", 0.3, "linear"),
        ("small", "sgd-nesterov", "mse", "sigmoid", 0.0, "cosine"),
        ("small", "adam", "cross_entropy", "gelu", 0.3, "one_cycle"),
        ("small", "adamw", "bce_with_logits", "silu", 0.0, "constant"),
        ("large", "sgd-nesterov", "cross_entropy", "leaky_relu", 0.3, "constant"),
        ("large", "adam", "mse", "gelu_tanh", 0.0, "constant"),
        ("large", "adamw", "bce_with_logits", "tanh", 0.2, "constant"),
    ],
)
def test_follows_eager(shape, optimizer, loss, activation, p, schedule, monkeypatch):
    if shape == "large":
        use_large_steps(monkeypatch)
    options = {**OPTIMIZERS[optimizer], "loss": loss, "schedule": schedule}
    batch, rows = (40, 65) if shape == "large" else (10, 17)  # two steps an epoch, the second short
    options |= {"steps": 3, "batch_size": batch, "seed": 2**63 + 9}
    model = network(WIDTHS, activation, p)
    x, y = data(WIDTHS, loss, rows)
    assert_follows_eager(model, x, y, options, losses=LOSS_TOLERANCE, weights=WEIGHT_TOLERANCE)


@pytest.mark.parametrize(("shape", "widths"), [("small", [9, 4]), ("large", [9, 4]), ("small", [5, 8, 8, 8, 2])])
def test_depths_images_and_no_bias(shape, widths, monkeypatch):
    if shape == "large":
        use_large_steps(monkeypatch)
    options = {"steps": 3, "batch_size": 24, "lr": 0.1, "label_smoothing": 0.1}
    model = network(widths, None, bias=False)
    x, y = data(widths, "cross_entropy", images=True)
    assert_follows_eager(model, x, y, options, losses=LOSS_TOLERANCE, weights=WEIGHT_TOLERANCE)


def test_strips_that_several_programs_share():
    widths = [5, 20, 520, 3]
    model = network(widths, "gelu", 0.2)
    x, y = data(widths, "cross_entropy", rows=16)
    options = {"steps": 2, "batch_size": 16, "lr": 0.1}
    assert_follows_eager(model, x, y, options, losses=LOSS_TOLERANCE, weights=WEIGHT_TOLERANCE)


@pytest.mark.parametrize(
    ("widths", "optimizer", "loss", "activation", "bias"),
    [
        ([7, 20, 4], "sgd", "cross_entropy", "relu", True),
        ([7, 20, 12, 4], "adam", "mse", "gelu", True),
        ([7, 16, 9, 12, 4], "sgd-nesterov", "bce_with_logits", "sigmoid", False),
    ],
)
def test_narrow_networks_follow_eager(widths, optimizer, loss, activation, bias, monkeypatch):
    monkeypatch.setattr(narrow, "FEWEST_ROWS", 1)
    model = network(widths, activation, bias=bias)
    options = {**OPTIMIZERS[optimizer], "steps": 3, "batch_size": 40, "loss": loss}
    x, y = data(widths, loss, rows=65)
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
    options = {"steps": 200, "batch_size": batch, "lr": 0.05, "precision": precision, "progress": False}
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
@pytest.mark.parametrize("memory", ["plan", "caching", "stream"])
def test_the_same_bits_wherever_memory_comes_from(memory):
    torch.manual_seed(0)
    x, y = torch.randn(700, 96, device=DEVICE), torch.randint(10, (700,), device=DEVICE)
    runs = []
    for kind in ("plan", memory):
        torch.manual_seed(1)
        model = network([96, 200, 72, 10], "gelu", 0.1)
        ol.fit(
            model, x, y, epochs=3, batch_size=96, lr=0.05, engine="graph", precision="bf16", memory=kind, progress=False
        )
        runs.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*runs)


def test_stops_at_a_step_and_goes_on_from_its_state():
    options = {"epochs": 2, "batch_size": 4, "lr": 0.05, "momentum": 0.9}
    x, y = data(WIDTHS, "cross_entropy", rows=14)
    model, twin = network(WIDTHS, "relu", 0.2), network(WIDTHS, "relu", 0.2)
    twin.load_state_dict(model.state_dict())
    whole = session(twin, x, y, options)
    expected = torch.cat([segment.losses for segment in whole.segments(0, Silent())])
    whole.close()
    part = session(model, x, y, options)
    first = next(part.segments(0, Silent(reports=1)))
    assert len(first.losses) == 2  # the one reported, and the one under way by then
    state = part.snapshot()
    part.close()
    assert set(state) == {f"momentum.{name}" for name in model.state_dict()}
    rest = session(model, x, y, options, state=state)
    got = torch.cat([first.losses, *(segment.losses for segment in rest.segments(2, Silent()))])
    rest.close()
    assert torch.equal(got, expected)
    assert_same_weights(model, twin, 0.0)


def test_epochs_run_ahead_of_their_results(monkeypatch):
    from onelaunch.engines.graph.session import GraphSession

    options = {"epochs": 3, "batch_size": 8, "lr": 0.05}
    x, y = data(WIDTHS, "cross_entropy", rows=14)
    model, twin = network(WIDTHS, "relu"), network(WIDTHS, "relu")
    twin.load_state_dict(model.state_dict())
    check = (x[:5], y[:5])
    plain = session(twin, x, y, options, validation=check)
    expected = list(plain.segments(0, Silent()))
    plain.close()
    monkeypatch.setattr(GraphSession, "_is_short", lambda self, step: True)
    ahead = session(model, x, y, options, validation=check)
    segments = list(ahead.segments(0, Silent()))
    ahead.close()
    for got, want in zip(segments, expected, strict=True):
        assert torch.equal(got.losses, want.losses)
        assert (got.first_step, got.correct, got.validation) == (want.first_step, want.correct, want.validation)
    assert_same_weights(model, twin, 0.0)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes with NumPy
def test_stops_when_the_loss_is_not_finite():
    options = {"epochs": 1, "batch_size": 10, "lr": 1e30}
    x, y = data(WIDTHS, "cross_entropy")
    graph = session(network(WIDTHS, "relu"), x, y, options)
    segment = next(graph.segments(0, Silent()))
    graph.close()
    assert len(segment.losses) < 5
    assert not torch.isfinite(segment.losses[-1])
