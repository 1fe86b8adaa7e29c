"""The resident engine on a GPU: it follows the eager engine step by step, and ends well whatever happens.

Every specialisation costs a second or two of NVRTC, so tests share shapes and each parity row tries several options at once.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import onelaunch as ol
from onelaunch.engines.contract import Run
from onelaunch.errors import DivergedError, OnelaunchError, UnsupportedError
from onelaunch.train.inputs import make_run
from tests.conftest import LOSS_TOLERANCE, WEIGHT_TOLERANCE
from tests.engines.graph.harness import DEVICE, Silent, network
from tests.reference import OPTIMIZERS, assert_same_course, assert_same_weights, problem

pytestmark = pytest.mark.gpu
SMALL, DEEP = [20, 40, 24, 5], [784, 128, 128, 128, 10]
PLACEMENTS: dict[str, dict[str, Any]] = {
    "one block": {"blocks": 1, "cluster": False, "by_rows": False},
    "cluster": {"blocks": 2, "cluster": True, "by_rows": False},
    "grid": {"blocks": 5, "cluster": False, "by_rows": False},
    "rows": {"blocks": 2, "cluster": True, "by_rows": True},
}
# Beside fp32: what rounding of the operands does to 200 steps.
LOOSER = {"tf32": 1e-3, "bf16": 2e-2, "fp16": 2e-2}


def rows_of(widths: list[int], loss: str = "cross_entropy", rows: int = 600, *, images: bool = False) -> Any:
    """Rows whose target can be learned, so that courses do not part by chance."""
    torch.manual_seed(3)
    x, y = problem(loss, rows, widths[0], widths[-1])
    if images:
        x = (x * 40 + 128).clamp(0, 255).to(torch.uint8)
    return x.to(DEVICE), y.to(DEVICE)


def pair(widths: list[int], activation: str | None = "relu", p: float = 0.0, *, bias: bool = True) -> Any:
    torch.manual_seed(4)
    model = network(widths, activation, p, bias=bias)
    return model, copy.deepcopy(model)


def fit(model: nn.Module, x: torch.Tensor, y: torch.Tensor, engine: str, **options: Any) -> Any:
    return ol.fit(
        model, x, y, engine=engine, progress=False, **{"steps": 200, "lr": 0.05, "precision": "fp32", **options}
    )


def follow_eager(models: Any, x: torch.Tensor, y: torch.Tensor, **options: Any) -> Any:
    """Both engines over 200 steps in fp32: losses, weights, right predictions and validation agree."""
    model, twin = models
    check = (x[:77], y[:77])
    got = fit(model, x, y, "resident", validation=check, **options)
    want = fit(twin, x, y, "eager", validation=check, **options)
    assert_same_course(got.losses, want.losses, LOSS_TOLERANCE)
    assert_same_weights(model, twin, WEIGHT_TOLERANCE)
    assert got.allocations["launches"] == 1
    for ours, theirs in zip(got.epochs, want.epochs, strict=True):
        assert ours["step"] == theirs["step"]
        assert ours["accuracy"] == theirs["accuracy"] or options.get("loss") == "mse"
        assert ours["validation"]["accuracy"] == theirs["validation"]["accuracy"]
        assert ours["validation"]["loss"] == pytest.approx(theirs["validation"]["loss"], rel=LOSS_TOLERANCE)
    return got


def losses_of(session: Any) -> list[float]:
    try:
        return torch.cat([segment.losses for segment in session.segments(0, Silent())]).tolist()
    finally:
        session.close()


def placed(run: Run, place: str, **more: Any) -> Any:
    from onelaunch.device import chip_of
    from onelaunch.engines.resident.plan.placement import choose_plan
    from onelaunch.engines.resident.session import ResidentSession, settings_for

    precision = "tf32" if run.spec.precision == "auto" else run.spec.precision
    plan = choose_plan(settings_for(run, precision), chip_of(run.device), **PLACEMENTS[place])
    return ResidentSession(run, {}, plan=plan, **more)


# Parity in fp32.


@pytest.mark.parametrize(
    ("optimizer", "loss", "activation", "p", "schedule", "more"),
    [
        ("sgd", "cross_entropy", "relu", 0.3, "constant", {}),
        ("sgd-momentum", "mse", "tanh", 0.0, "linear", {}),
        ("sgd-nesterov", "cross_entropy", "leaky_relu", 0.0, "cosine", {"label_smoothing": 0.1}),
        ("adam", "bce_with_logits", "gelu", 0.2, "one_cycle", {}),
        ("adamw", "cross_entropy", "silu", 0.0, "cosine", {}),
        ("adam", "mse", "sigmoid", 0.0, "constant", {}),
        ("sgd", "bce_with_logits", "gelu_tanh", 0.5, "linear", {"seed": 2**63 + 9}),
    ],
)
def test_follows_eager(optimizer, loss, activation, p, schedule, more):
    x, y = rows_of(SMALL, loss)
    options = {**OPTIMIZERS[optimizer], "loss": loss, "schedule": schedule, "batch_size": 32, **more}
    follow_eager(pair(SMALL, activation, p), x, y, **options)


@pytest.mark.parametrize(
    ("widths", "batch", "images", "bias"),
    [
        ([7, 3], 16, False, True),  # one Linear
        ([784, 10], 64, True, False),
        ([3, 1, 1, 2], 5, False, True),  # one unit wide
        (SMALL, 1, False, True),
        (SMALL, 37, False, False),
        ([64, 64, 64, 16], 1000, False, True),  # several passes a step
        ([33, 50, 64], 100, False, True),  # as many outputs as there may be
        (DEEP, 32, True, True),
        ([300, 300, 300, 10], 48, True, True),  # wide enough for the grid
    ],
)
def test_odd_sizes_follow_eager(widths, batch, images, bias):
    rows = 1900 if batch > 500 else 600
    x, y = rows_of(widths, rows=rows, images=images)
    lr = 0.005 if images else 0.05  # pixels are all positive: a larger step overshoots, and rounding grows
    follow_eager(pair(widths, "relu", bias=bias), x, y, batch_size=batch, lr=lr)


@pytest.mark.parametrize("place", PLACEMENTS)
def test_placements_agree_and_draw_the_same_masks(place):
    x, y = rows_of(SMALL)
    model, twin = pair(SMALL, "relu", 0.3)
    options = {"steps": 200, "batch_size": 32, "lr": 0.05, "precision": "fp32"}
    want = fit(twin, x, y, "eager", **options)
    got = losses_of(placed(make_run(model, x, y, None, options), place))
    assert_same_course(got, want.losses, LOSS_TOLERANCE)
    assert_same_weights(model, twin, WEIGHT_TOLERANCE)


@pytest.mark.parametrize("images", [True, False])
def test_validation_where_rows_have_one_buffer(images):
    """With lr = 0 the model stands still: what is right can be computed beside the run."""
    widths = [784, 784, 784, 784, 10]
    x, y = rows_of(widths, rows=400, images=images)
    model = pair(widths)[0]
    check = (x[:333], y[:333])
    history = fit(model, x, y, "resident", validation=check, lr=0.0, steps=3, batch_size=64, precision="bf16")
    assert "no room for two" in history.plan
    assert ("partial sums" in history.plan) == images  # else they lie among the staged values
    output = model(check[0] / 255 if images else check[0])
    found = history.epochs[0]["validation"]
    assert found["loss"] == pytest.approx(nn.functional.cross_entropy(output, check[1]).item(), rel=LOOSER["bf16"])
    assert found["accuracy"] == pytest.approx((output.argmax(1) == check[1]).float().mean().item(), abs=0.02)


def test_images_of_floats_train_as_their_bytes_do():
    x, y = rows_of(DEEP, images=True)
    model, twin = pair(DEEP)
    got = fit(model, x / 255, y, "resident", precision="bf16", lr=0.005, validation=(x[:50] / 255, y[:50]))
    want = fit(twin, x, y, "resident", precision="bf16", lr=0.005, validation=(x[:50], y[:50]))
    assert got.plan == want.plan
    assert got.losses == want.losses
    assert all(a.equal(b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize(
    ("widths", "batch", "images"),
    [
        ([784, 784, 784, 784, 10], 64, True),
        ([784, 784, 784, 784, 10], 64, False),
        ([784, 512, 512, 512, 10], 96, True),  # six row tiles in one pass
        ([784, 512, 512, 512, 10], 32, False),
    ],
)
def test_wide_networks_stay_close(widths, batch, images):
    x, y = rows_of(widths, rows=1000, images=images)
    model, twin = pair(widths)
    options = {"batch_size": batch, "lr": 0.005 if images else 0.05}
    got = fit(model, x, y, "resident", precision="bf16", validation=(x[:100], y[:100]), **options)
    want = fit(twin, x, y, "eager", **options)
    assert "passes" not in got.plan.splitlines()[3]
    assert_same_course(got.losses, want.losses, LOOSER["bf16"])


@pytest.mark.parametrize("images", [True, False])
@pytest.mark.parametrize("precision", LOOSER)
def test_lower_precisions_stay_close(precision, images):
    x, y = rows_of(DEEP, rows=2000, images=images)
    model, twin = pair(DEEP)
    got = fit(model, x, y, "resident", precision=precision)
    want = fit(twin, x, y, "eager")
    assert got.precision == precision
    assert_same_course(got.losses, want.losses, LOOSER[precision])


def test_auto_says_what_it_chose():
    x, y = rows_of(DEEP, images=True)
    history = fit(pair(DEEP)[0], x, y, "auto", precision="auto")
    assert (history.engine, history.precision) == ("resident", "tf32")
    assert history.plan.startswith("resident: 784-128-128-128-10")
    assert " 0 bytes of stack" in history.plan


@pytest.mark.parametrize(
    ("widths", "blocks", "batch", "loss"),
    [
        ([20, 40, 24, 64], 2, 37, "cross_entropy"),  # as many outputs as there may be; rows of nobody
        ([20, 48, 33], 4, 20, "mse"),
        ([30, 128, 128, 20], 16, 50, "bce_with_logits"),
        ([30, 128, 10], 16, 7, "cross_entropy"),  # one hidden layer: nothing but partial outputs is exchanged
        ([30, 256, 64, 17], 8, 130, "cross_entropy"),  # several tiles a block, several passes or many rows an owner
    ],
)
def test_outputs_summed_over_a_cluster_follow_eager(widths, blocks, batch, loss, monkeypatch):
    monkeypatch.setitem(PLACEMENTS, "cluster", {"blocks": blocks, "cluster": True, "by_rows": False})
    x, y = rows_of(widths, loss)
    model, twin = pair(widths, "relu", 0.2)
    options = {"steps": 60, "batch_size": batch, "lr": 0.02, "precision": "fp32", "loss": loss}
    got = losses_of(placed(make_run(model, x, y, None, options), "cluster"))
    want = fit(twin, x, y, "eager", **options)
    assert_same_course(got, want.losses, LOSS_TOLERANCE)
    assert_same_weights(model, twin, WEIGHT_TOLERANCE)


# The course of a run.


@pytest.mark.parametrize("place", PLACEMENTS)
def test_the_same_seed_gives_the_same_bits(place):
    x, y = rows_of(SMALL)
    options = {"epochs": 30, "batch_size": 32, "lr": 0.05, "precision": "bf16"}
    runs = []
    for _ in range(3):
        model = pair(SMALL)[0]
        losses = losses_of(placed(make_run(model, x, y, None, options), place))
        runs.append((losses, torch.cat([tensor.flatten() for tensor in model.state_dict().values()])))
    assert all(losses == runs[0][0] and torch.equal(weights, runs[0][1]) for losses, weights in runs)


@pytest.mark.parametrize("place", PLACEMENTS)
def test_a_stop_leaves_the_weights_of_the_last_step(place):
    x, y = rows_of(SMALL, rows=400_000)
    model, twin = pair(SMALL)
    options = {"batch_size": 1, "lr": 1e-4, "precision": "bf16"}
    session = placed(make_run(model, x, y, None, {**options, "epochs": 1}), place)
    losses = next(session.segments(0, Silent(reports=1))).losses.tolist()
    session.close()
    assert 0 < len(losses) < 400_000
    again = losses_of(placed(make_run(twin, x, y, None, {**options, "steps": len(losses)}), place))
    assert losses == again
    assert_same_weights(model, twin, 0.0)


@pytest.mark.parametrize("optimizer", ["sgd-momentum", "adam"])
def test_a_resumed_run_ends_in_the_same_bits(optimizer, tmp_path):
    x, y = rows_of(SMALL)
    options = {**OPTIMIZERS[optimizer], "steps": None, "batch_size": 32, "precision": "bf16"}
    whole, part = pair(SMALL, "relu", 0.3)
    want = fit(whole, x, y, "resident", epochs=4, **options)
    place = tmp_path / "run.safetensors"
    fit(part, x, y, "resident", epochs=2, checkpoint=place, **options)
    resumed = pair(SMALL, "relu", 0.3)[0]
    got = fit(resumed, x, y, "resident", epochs=4, checkpoint=place, resume=True, **options)
    assert got.losses == want.losses
    assert_same_weights(resumed, whole, 0.0)


@pytest.mark.parametrize("place", ["cluster", "grid", "rows"])
def test_a_silent_block_ends_the_run_with_the_phase_named(place):
    x, y = rows_of(SMALL)
    model = pair(SMALL)[0]
    run = make_run(model, x, y, None, {"steps": 2000, "batch_size": 32, "lr": 0.01, "precision": "bf16"})
    session = placed(run, place, fault=(70, 1), patience=0.5)
    awaited = "partial gradients" if place == "rows" else r"the (values|deltas) of layer \d"
    with pytest.raises(OnelaunchError, match=rf"block \d+ waited in vain for {awaited} at step 7\d"):
        losses_of(session)
    assert all(torch.isfinite(tensor).all() for tensor in model.state_dict().values())


def test_a_loss_that_is_not_finite_stops_the_run():
    x, y = rows_of(SMALL)
    with pytest.raises(DivergedError, match=r"the loss is (nan|inf) at step \d+: pass a smaller lr"):
        fit(pair(SMALL)[0], x, y, "resident", lr=1e30, steps=20_000, precision="bf16")


# What it does not take.


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        ([nn.Linear(20, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5)], "BatchNorm1d is not in this engine"),
        ([nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 65)], "65 outputs"),
        ([nn.Dropout(0.1), nn.Linear(20, 5)], "before the first Linear"),
    ],
)
def test_what_it_cannot_run_goes_elsewhere_with_the_reason(layers, reason):
    model = nn.Sequential(*layers).to(DEVICE)
    x, y = rows_of(SMALL)
    history = fit(copy.deepcopy(model), x, y, "auto", steps=2, precision="auto")
    assert history.engine != "resident"
    assert reason in history.reason
    with pytest.raises(UnsupportedError, match=reason):
        fit(model, x, y, "resident", steps=2)
