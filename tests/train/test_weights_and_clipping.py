"""Row weights and clipping by the global norm: every engine against a hand-written PyTorch loop in float64."""

from __future__ import annotations

import contextlib
import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import onelaunch as ol
from tests.conftest import LOSS_TOLERANCE, WEIGHT_TOLERANCE
from tests.reference import OPTIMIZERS, assert_same_course, assert_same_weights, problem, weighted_loop

pytestmark = pytest.mark.usefixtures("one_thread")
ENGINES = ("eager", "cpu", *(pytest.param(name, marks=pytest.mark.gpu) for name in ("graph", "resident", "eager-cuda")))
STEPS, BATCH, ROWS = 200, 24, 150


def place(engine: str) -> tuple[str, str]:
    """(engine, device)"""
    return engine.removesuffix("-cuda"), "cpu" if engine in ("eager", "cpu") else "cuda"


def network(outputs: int, inputs: int = 7) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 20), nn.Tanh(), nn.Linear(20, 33), nn.GELU(), nn.Linear(33, outputs))


CASES = {  # loss, outputs, clip_norm, optimizer, label_smoothing
    "few classes": ("cross_entropy", 4, 0.1, "sgd-momentum", 0.0),
    "smoothed": ("cross_entropy", 4, None, "adamw", 0.2),
    "many classes": ("cross_entropy", 40, 0.2, "adam", 0.1),
    "mse": ("mse", 5, 0.05, "rmsprop", 0.0),
    "bce": ("bce_with_logits", 3, 0.1, "sgd-nesterov", 0.0),
}


@pytest.mark.parametrize(("case", "weighted"), [*((case, True) for case in CASES), ("many classes", False)])
@pytest.mark.parametrize("engine", ENGINES)
def test_follows_a_loop_by_hand(engine, case, weighted):
    loss, outputs, clip_norm, optimizer, smoothing = CASES[case]
    name, device = place(engine)
    if name == "resident":
        clip_norm = None  # which it leaves to other engines
    torch.manual_seed(1)
    x, y = problem(loss, ROWS, 7, outputs)
    weights = torch.rand(ROWS) * (torch.rand(ROWS) > 0.2) if weighted else torch.ones(ROWS)
    model = network(outputs)
    twin = copy.deepcopy(model)
    options = OPTIMIZERS[optimizer]
    expected = weighted_loop(
        twin, x, y, weights, steps=STEPS, batch_size=BATCH, options=options, loss=loss, label_smoothing=smoothing,
        clip_norm=clip_norm,
    )  # fmt: skip
    model.to(device)
    history = ol.fit(
        model, x, y, steps=STEPS, batch_size=BATCH, loss=loss, label_smoothing=smoothing, engine=name, precision="fp32",
        sample_weight=weights if weighted else None, clip_norm=clip_norm, progress=False, **options,
    )  # fmt: skip
    # Without clipping, few classes are learned by heart: at a loss of 0.001 its relative error is that of the logits.
    compared = 100 if name == "resident" else STEPS
    assert_same_course(history.losses[:compared], expected[:compared], LOSS_TOLERANCE)
    assert_same_weights(model.cpu(), twin, WEIGHT_TOLERANCE)
    sums = [weights[rows].sum().item() for rows in ol.permutation(ROWS, 0, 0).split(BATCH)]
    assert history.epochs[0]["loss"] == pytest.approx(np.average(expected[: len(sums)], weights=sums), rel=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_class_weights_are_those_of_pytorch_and_scikit_learn(engine):
    torch.manual_seed(2)
    x, y = problem("cross_entropy", 300, 7, 3)
    y[y == 2] = torch.where(torch.rand(int((y == 2).sum())) < 0.8, 0, 2)
    counts = torch.bincount(y, minlength=3)
    balanced = len(y) / (3 * counts.double())
    for given, weight in (
        ("balanced", balanced),
        ({2: 5.0}, torch.tensor([1.0, 1.0, 5.0])),
        ([0.5, 2, 1], [0.5, 2, 1]),
    ):
        model, (name, device) = network(3), place(engine)
        expected = F.cross_entropy(model(x).double(), y, weight=torch.as_tensor(weight).double()).item()
        history = ol.fit(
            model.to(device), x, y, steps=1, batch_size=300, lr=0.0, class_weight=given, engine=name, precision="fp32",
            progress=False,
        )  # fmt: skip
        assert history.losses[0] == pytest.approx(expected, rel=1e-5)


def test_a_run_with_a_list_of_class_weights_resumes(tmp_path):
    x, y = problem("cross_entropy", 60, 7, 3)
    options = {"class_weight": np.array([0.5, 2, 1]), "progress": False, "checkpoint": tmp_path / "run.safetensors"}
    ol.fit(network(3), x, y, epochs=1, **options)
    resumed = ol.fit(network(3), x, y, epochs=2, resume=True, **options)
    assert resumed.losses == ol.fit(network(3), x, y, epochs=2, **{**options, "checkpoint": None}).losses


def test_one_output_takes_two_class_weights():
    x, y = problem("cross_entropy", 60, 7, 2)
    for weight, accepted in (([1.0, 3.0], True), ([1.0], False), ([1.0, 3.0, 1.0], False)):
        with contextlib.nullcontext() if accepted else pytest.raises(ol.OnelaunchError, match="for 2 classes"):
            ol.fit(network(1), x, y, epochs=1, loss="bce_with_logits", progress=False, class_weight=weight)


def test_class_weights_by_name_and_of_one_output():
    x, y = problem("cross_entropy", 100, 7, 2)
    names = np.array(["no", "yes"])[y.numpy()]
    rows = torch.where(y == 1, 3.0, 1.0)
    runs = {
        "names": (names, {"class_weight": {"yes": 3.0}}),
        "numbers": (y, {"class_weight": {1: 3.0}}),
        "rows": (y, {"sample_weight": rows}),
        "both": (y, {"class_weight": {"1": 6.0}, "sample_weight": torch.where(y == 1, 0.5, 1.0)}),
    }
    losses = [
        ol.fit(network(2), x, target, epochs=2, progress=False, engine="eager", **options).losses
        for target, options in runs.values()
    ]
    assert all(found == losses[0] for found in losses)
    one = [
        ol.fit(network(1), x, y, epochs=2, loss="bce_with_logits", progress=False, engine="eager", **options).losses
        for options in ({"class_weight": {1: 3.0}}, {"sample_weight": rows})
    ]
    assert one[0] == one[1]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_batch_without_weight_changes_nothing_by_itself(engine):
    """Σ w = 0 has no mean: the loss counts as 0 and the gradient as zero, instead of NaN."""
    x, y = problem("cross_entropy", 40, 7, 4)
    weights = torch.zeros(40)
    weights[ol.permutation(40, 0, 0)[:10]] = 1.0
    name, device = place(engine)
    model = network(4).to(device)
    options = {"optimizer": "sgd", "lr": 0.1, "batch_size": 10, "engine": name, "progress": False}
    history = ol.fit(model, x, y, epochs=1, sample_weight=weights, **options)
    assert history.losses[1:] == [0.0, 0.0, 0.0]
    once = network(4).to(device)
    ol.fit(once, x, y, steps=1, sample_weight=weights, **options)
    assert_same_weights(model, once, 0.0)


def test_weights_of_one_keep_the_course_and_a_loose_clip_too():
    x, y = problem("cross_entropy")
    runs = []
    for options in ({}, {"sample_weight": torch.full((len(x),), 2.0)}, {"clip_norm": 1e6}):
        model = network(4)
        losses = ol.fit(model, x, y, epochs=5, engine="cpu", progress=False, **options).losses
        runs.append((model, losses))
    for model, losses in runs[1:]:
        assert_same_course(losses, runs[0][1], LOSS_TOLERANCE)
        assert_same_weights(model, runs[0][0], WEIGHT_TOLERANCE)
