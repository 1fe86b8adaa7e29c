"""The resident engine on a GPU: it follows the eager engine step by step, and ends well whatever happens.

Every specialisation costs a second or two of NVRTC, so tests share shapes, and each parity row combines several options.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from onelaunch.engines.resident import ACTIVATIONS
from onelaunch.errors import DivergedError, OnelaunchError, UnsupportedError
from onelaunch.integers import ceil_div
from onelaunch.rng import permutation
from onelaunch.run.schedule import SCHEDULES
from onelaunch.run.spec import LOSSES
from onelaunch.train.inputs import make_run
from tests import pairwise
from tests.conftest import LOSS_TOLERANCE, WEIGHT_TOLERANCE
from tests.engines.graph.harness import DEVICE, Silent
from tests.engines.resident.gpu_runs import PLACEMENTS, fit, losses_of, pair, placed, rows_of
from tests.reference import OPTIMIZERS, assert_same_course, assert_same_weights, weighted_loop

pytestmark = pytest.mark.gpu
SMALL, DEEP = [20, 40, 24, 5], [784, 128, 128, 128, 10]
# Relative tolerance of losses beside fp32: the effect of rounded operands over 200 steps.
LOOSER = {"tf32": 1e-3, "bf16": 2e-2, "fp16": 2e-2}
# Lion's steps have the sign of a number that may be as small as its rounding error, so runs part earlier than others.
STEPS = {"lion": 40}


def rotated(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows in which every value occurs at least twice, in different company; all pairs with `--all-cases`.

    Activations and optimizers do not interact, and each row compiles a kernel of its own.
    """
    if pairwise.ALL_CASES:
        return pairwise.cases(*axes)
    longest = max(map(len, axes))
    return [tuple(axis[(i + i // longest) % len(axis)] for axis in axes) for i in range(2 * longest)]


def follow_eager(models: Any, x: torch.Tensor, y: torch.Tensor, **options: Any) -> Any:
    """Both engines in fp32: losses, weights, correct predictions and validation agree."""
    model, twin = models
    validation = (x[:77], y[:77])
    got = fit(model, x, y, "resident", validation=validation, **options)
    expected = fit(twin, x, y, "eager", validation=validation, **options)
    assert_same_course(got.losses, expected.losses, LOSS_TOLERANCE)
    assert_same_weights(model, twin, WEIGHT_TOLERANCE)
    assert got.allocations["launches"] == 1
    for ours, theirs in zip(got.epochs, expected.epochs, strict=True):
        assert ours["step"] == theirs["step"]
        assert ours["accuracy"] == theirs["accuracy"] or options.get("loss") == "mse"
        assert ours["validation"]["accuracy"] == theirs["validation"]["accuracy"]
        assert ours["validation"]["loss"] == pytest.approx(theirs["validation"]["loss"], rel=LOSS_TOLERANCE)
    return got


# Parity in fp32.


@pytest.mark.parametrize(
    ("activation", "optimizer", "loss", "schedule", "p"),
    rotated(sorted(ACTIVATIONS), list(OPTIMIZERS), LOSSES, list(SCHEDULES), (0.0, 0.3)),
)
def test_follows_eager(activation, optimizer, loss, schedule, p):
    x, y = rows_of(SMALL, loss)
    options = {**OPTIMIZERS[optimizer], "loss": loss, "schedule": schedule, "batch_size": 32}
    follow_eager(pair(SMALL, activation, p), x, y, steps=STEPS.get(optimizer, 200), **options)


@pytest.mark.parametrize("more", [{"label_smoothing": 0.1}, {"seed": 2**63 + 9}])
def test_other_options_follow_eager(more):
    x, y = rows_of(SMALL)
    follow_eager(pair(SMALL, "leaky_relu", 0.5), x, y, batch_size=32, schedule="cosine", **more)


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 7])
def test_short_runs_of_one_cycle_follow_eager(steps):
    x, y = rows_of(SMALL)
    follow_eager(pair(SMALL, "tanh"), x, y, batch_size=32, schedule="one_cycle", optimizer="sgd", lr=0.5, steps=steps)


@pytest.mark.parametrize(
    ("activation", "optimizer", "place"), rotated(sorted(ACTIVATIONS), list(OPTIMIZERS), list(PLACEMENTS))
)
def test_bf16_stays_close_in_every_placement(activation, optimizer, place):
    x, y = rows_of(SMALL)
    model, twin = pair(SMALL, activation)
    options = {"steps": 40, "batch_size": 32, **OPTIMIZERS[optimizer]}
    got = losses_of(placed(make_run(model, x, y, None, {**options, "precision": "bf16"}), place))
    expected = fit(twin, x, y, "eager", **options)
    assert_same_course(got, expected.losses, LOOSER["bf16"])


@pytest.mark.parametrize(
    ("widths", "batch", "uint8_rows", "bias"),
    [
        ([7, 3], 16, False, True),  # one Linear
        ([784, 10], 64, True, False),
        ([3, 1, 1, 2], 5, False, True),  # one unit wide
        (SMALL, 1, False, True),
        (SMALL, 37, False, False),
        ([64, 64, 64, 16], 1000, False, True),  # several passes per step
        ([33, 50, 64], 100, False, True),  # the most outputs that the engine takes
        (DEEP, 32, True, True),
        ([300, 300, 300, 10], 48, True, True),  # wide enough for the grid
    ],
)
def test_odd_sizes_follow_eager(widths, batch, uint8_rows, bias):
    rows = 1900 if batch > 500 else 600
    x, y = rows_of(widths, rows=rows, uint8_rows=uint8_rows)
    lr = (
        0.005 if uint8_rows else 0.05
    )  # uint8 rows are all positive: a larger step overshoots, and rounding errors grow
    follow_eager(pair(widths, "relu", bias=bias), x, y, batch_size=batch, lr=lr)


@pytest.mark.parametrize("place", PLACEMENTS)
def test_placements_agree_and_draw_the_same_masks(place):
    x, y = rows_of(SMALL)
    model, twin = pair(SMALL, "relu", 0.3)
    options = {"steps": 200, "batch_size": 32, "optimizer": "sgd", "lr": 0.05, "precision": "fp32"}
    expected = fit(twin, x, y, "eager", **options)
    got = losses_of(placed(make_run(model, x, y, None, options), place))
    assert_same_course(got, expected.losses, LOSS_TOLERANCE)
    assert_same_weights(model, twin, WEIGHT_TOLERANCE)


@pytest.mark.parametrize("uint8_rows", [True, False])
def test_validation_where_rows_have_one_buffer(uint8_rows):
    """With lr = 0 the model does not change, so the validation can be computed beside the run."""
    widths = [784, 784, 784, 784, 10]
    x, y = rows_of(widths, rows=400, uint8_rows=uint8_rows)
    model = pair(widths)[0]
    validation = (x[:333], y[:333])
    history = fit(model, x, y, "resident", validation=validation, lr=0.0, steps=3, batch_size=64, precision="bf16")
    assert "no room for two" in history.plan
    assert ("partial sums" in history.plan) == uint8_rows  # otherwise they share the memory of the staged values
    output = model(validation[0] / 255 if uint8_rows else validation[0])
    found = history.epochs[0]["validation"]
    assert found["loss"] == pytest.approx(nn.functional.cross_entropy(output, validation[1]).item(), rel=LOOSER["bf16"])
    assert found["accuracy"] == pytest.approx((output.argmax(1) == validation[1]).float().mean().item(), abs=0.02)


def test_float_multiples_of_1_over_255_train_as_uint8_rows_do():
    x, y = rows_of(DEEP, uint8_rows=True)
    model, twin = pair(DEEP)
    got = fit(model, x / 255, y, "resident", precision="bf16", lr=0.005, validation=(x[:50] / 255, y[:50]))
    expected = fit(twin, x, y, "resident", precision="bf16", lr=0.005, validation=(x[:50], y[:50]))
    assert got.plan == expected.plan
    assert got.losses == expected.losses
    assert all(a.equal(b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize(
    ("widths", "batch", "uint8_rows"),
    [
        ([784, 784, 784, 784, 10], 64, True),
        ([784, 784, 784, 784, 10], 64, False),
        ([784, 512, 512, 512, 10], 96, True),  # six row tiles in one pass
        ([784, 512, 512, 512, 10], 32, False),
    ],
)
def test_wide_networks_stay_close(widths, batch, uint8_rows):
    x, y = rows_of(widths, rows=1000, uint8_rows=uint8_rows)
    model, twin = pair(widths)
    options = {"batch_size": batch, "optimizer": "sgd", "lr": 0.005 if uint8_rows else 0.05}
    got = fit(model, x, y, "resident", precision="bf16", validation=(x[:100], y[:100]), **options)
    expected = fit(twin, x, y, "eager", **options)
    assert "passes" not in got.plan.splitlines()[3]
    assert_same_course(got.losses, expected.losses, LOOSER["bf16"])


@pytest.mark.parametrize("uint8_rows", [True, False])
@pytest.mark.parametrize("precision", LOOSER)
def test_lower_precisions_stay_close(precision, uint8_rows):
    x, y = rows_of(DEEP, rows=2000, uint8_rows=uint8_rows)
    model, twin = pair(DEEP)
    got = fit(model, x, y, "resident", precision=precision)
    expected = fit(twin, x, y, "eager")
    assert got.precision == precision
    assert_same_course(got.losses, expected.losses, LOOSER[precision])


def test_auto_chooses_the_resident_engine_for_a_small_network():
    x, y = rows_of(DEEP, uint8_rows=True)
    history = fit(pair(DEEP)[0], x, y, "auto", precision="auto")
    assert (history.engine, history.precision) == ("resident", "tf32")
    assert history.plan.startswith("resident: 784-128-128-128-10")
    assert " 0 bytes of stack" in history.plan


@pytest.mark.parametrize(
    ("widths", "blocks", "batch", "loss"),
    [
        ([20, 40, 24, 64], 2, 37, "cross_entropy"),  # the most outputs that the engine takes; rows without an owner
        ([20, 48, 33], 4, 20, "mse"),
        ([30, 128, 128, 20], 16, 50, "bce_with_logits"),
        ([30, 128, 10], 16, 7, "cross_entropy"),  # one hidden layer: nothing but partial outputs is exchanged
        ([30, 256, 64, 17], 8, 130, "cross_entropy"),  # several tiles per block, several passes or many rows per owner
    ],
)
def test_outputs_summed_over_a_cluster_follow_eager(widths, blocks, batch, loss):
    cluster = {"blocks": blocks, "cluster": True, "by_rows": False}
    x, y = rows_of(widths, loss)
    model, twin = pair(widths, "relu", 0.2)
    options = {"steps": 60, "batch_size": batch, "optimizer": "sgd", "lr": 0.02, "precision": "fp32", "loss": loss}
    got = losses_of(placed(make_run(model, x, y, None, options), cluster))
    expected = fit(twin, x, y, "eager", **options)
    assert_same_course(got, expected.losses, LOSS_TOLERANCE)
    assert_same_weights(model, twin, WEIGHT_TOLERANCE)


# Row weights.


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("place", PLACEMENTS)
def test_row_weights_follow_a_loop_in_float64(place, loss):
    """Losses, weights of the network and the summed weights of each batch; a fifth of the rows weighs nothing."""
    x, y = rows_of(SMALL, loss)
    torch.manual_seed(5)
    weights = torch.rand(len(x), device=DEVICE) * (torch.rand(len(x), device=DEVICE) > 0.2)
    model, twin = pair(SMALL, "tanh")
    options = {"steps": 100, "batch_size": 37, "precision": "fp32", "loss": loss, **OPTIMIZERS["adam"]}
    session = placed(make_run(model, x, y, None, options, sample_weight=weights), place)
    segments = list(session.segments(0, Silent()))
    session.close()
    expected = weighted_loop(twin, x, y, weights, steps=100, batch_size=37, options=OPTIMIZERS["adam"], loss=loss)
    assert_same_course(torch.cat([segment.losses for segment in segments]).tolist(), expected, LOSS_TOLERANCE)
    assert_same_weights(model, twin, WEIGHT_TOLERANCE)
    steps = ceil_div(len(x), 37)
    sums = [
        weights.double()[rows].sum()
        for epoch in range(3)
        for rows in permutation(len(x), 0, epoch, device=DEVICE).split(37)
    ]
    assert len(sums) == 3 * steps
    got = torch.cat([segment.weights for segment in segments])
    torch.testing.assert_close(got[: 3 * steps], torch.stack(sums).cpu(), rtol=1e-12, atol=0.0)


@pytest.mark.parametrize(
    ("widths", "batch", "precision", "p"),
    [
        ([64, 64, 64, 16], 1000, "fp32", 0.0),
        ([300, 300, 300, 10], 48, "tf32", 0.2),
        (DEEP, 32, "fp16", 0.1),
        (DEEP, 32, "bf16", 0.1),
    ],
)
def test_class_weights_follow_eager(widths, batch, precision, p):
    """Also with several passes per step, dropout and validation rows, which have no weights."""
    x, y = rows_of(widths, rows=1900)
    model, twin = pair(widths, "relu", p)
    options = {"batch_size": batch, "class_weight": "balanced", "validation": (x[:77], y[:77]), "steps": 100}
    got = fit(model, x, y, "resident", precision=precision, **options)
    expected = fit(twin, x, y, "eager", **options)
    tolerance = LOOSER.get(precision, LOSS_TOLERANCE)
    assert_same_course(got.losses, expected.losses, tolerance)
    for ours, theirs in zip(got.epochs, expected.epochs, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=tolerance)
        assert ours["validation"]["loss"] == pytest.approx(theirs["validation"]["loss"], rel=10 * tolerance)


def test_weights_of_one_change_no_bit():
    x, y = rows_of(SMALL)
    model, twin = pair(SMALL)
    got = fit(model, x, y, "resident", sample_weight=torch.ones(len(x)), precision="bf16")
    expected = fit(twin, x, y, "resident", precision="bf16")
    assert got.losses == expected.losses
    assert_same_weights(model, twin, 0.0)


def test_a_weighted_run_resumes_with_the_same_bits(tmp_path):
    """One launch per epoch: each sums the weights of its own steps."""
    x, y = rows_of(SMALL)
    options = {"steps": None, "batch_size": 32, "precision": "bf16", "sample_weight": torch.linspace(0, 2, len(x))}
    whole, part = pair(SMALL)
    expected = fit(whole, x, y, "resident", epochs=4, **options)
    checkpoint = tmp_path / "run.safetensors"
    fit(part, x, y, "resident", epochs=2, checkpoint=checkpoint, **options)
    resumed = pair(SMALL)[0]
    got = fit(resumed, x, y, "resident", epochs=4, checkpoint=checkpoint, resume=True, **options)
    assert got.losses == expected.losses
    assert_same_weights(resumed, whole, 0.0)


# The course of a run.


@pytest.mark.parametrize("place", PLACEMENTS)
def test_the_same_seed_gives_the_same_bits(place):
    x, y = rows_of(SMALL)
    options = {"epochs": 30, "batch_size": 32, "optimizer": "sgd", "lr": 0.05, "precision": "bf16"}
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
    options = {"batch_size": 1, "optimizer": "sgd", "lr": 1e-4, "precision": "bf16"}
    session = placed(make_run(model, x, y, None, {**options, "epochs": 1}), place)
    losses = next(session.segments(0, Silent(reports=1))).losses.tolist()
    session.close()
    assert 0 < len(losses) < 400_000
    again = losses_of(placed(make_run(twin, x, y, None, {**options, "steps": len(losses)}), place))
    assert losses == again
    assert_same_weights(model, twin, 0.0)


@pytest.mark.parametrize("optimizer", ["sgd-momentum", "adam", "rmsprop-momentum", "lion"])
def test_a_resumed_run_ends_in_the_same_bits(optimizer, tmp_path):
    x, y = rows_of(SMALL)
    options = {**OPTIMIZERS[optimizer], "steps": None, "batch_size": 32, "precision": "bf16"}
    whole, part = pair(SMALL, "relu", 0.3)
    expected = fit(whole, x, y, "resident", epochs=4, **options)
    checkpoint = tmp_path / "run.safetensors"
    fit(part, x, y, "resident", epochs=2, checkpoint=checkpoint, **options)
    resumed = pair(SMALL, "relu", 0.3)[0]
    got = fit(resumed, x, y, "resident", epochs=4, checkpoint=checkpoint, resume=True, **options)
    assert got.losses == expected.losses
    assert_same_weights(resumed, whole, 0.0)


@pytest.mark.parametrize("place", ["cluster", "grid", "rows"])
def test_a_silent_block_ends_the_run_with_the_phase_named(place):
    x, y = rows_of(SMALL)
    model = pair(SMALL)[0]
    run = make_run(
        model, x, y, None, {"steps": 2000, "batch_size": 32, "optimizer": "sgd", "lr": 0.01, "precision": "bf16"}
    )
    session = placed(run, place, fault=(70, 1), patience=0.5)
    awaited = "partial gradients" if place == "rows" else r"the (values|deltas) of layer \d"
    with pytest.raises(OnelaunchError, match=rf"block \d+ timed out waiting for {awaited} at step 7\d"):
        losses_of(session)
    assert all(torch.isfinite(tensor).all() for tensor in model.state_dict().values())


def test_a_loss_that_is_not_finite_stops_the_run():
    x, y = rows_of(SMALL)
    with pytest.raises(DivergedError, match=r"the loss is (nan|inf) at step \d+: pass a smaller lr"):
        fit(pair(SMALL)[0], x, y, "resident", lr=1e30, steps=20_000, precision="bf16")


# Unsupported networks.


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        ([nn.Linear(20, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5)], "BatchNorm1d is not in this engine"),
        ([nn.Linear(20, 8), nn.ReLU(), nn.Linear(8, 65)], "65 outputs"),
        ([nn.Dropout(0.1), nn.Linear(20, 5)], "before the first Linear"),
    ],
)
def test_an_unsupported_network_runs_on_another_engine_with_the_reason(layers, reason):
    model = nn.Sequential(*layers).to(DEVICE)
    x, y = rows_of(SMALL)
    history = fit(copy.deepcopy(model), x, y, "auto", steps=2, precision="auto")
    assert history.engine != "resident"
    assert reason in history.reason
    with pytest.raises(UnsupportedError, match=reason):
        fit(model, x, y, "resident", steps=2)
