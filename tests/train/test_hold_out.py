"""`validation=0.1`: which rows are held out, and that the run is that of the remaining rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import onelaunch as ol
from onelaunch.train.hold_out import hold_out
from tests.reference import problem

pytestmark = pytest.mark.usefixtures("one_thread")


@given(st.lists(st.integers(0, 5), min_size=2, max_size=200), st.floats(0.01, 0.99), st.integers(0, 9))
def test_every_class_gives_its_share(labels, fraction, seed):
    classes = torch.tensor(labels)
    train, held = hold_out(len(labels), fraction, seed, classes)
    assert sorted([*train.tolist(), *held.tolist()]) == list(range(len(labels)))
    assert len(held) == min(max(round(len(labels) * fraction), 1), len(labels) - 1)
    share = len(held) / len(labels)
    for label in set(labels):
        assert abs((classes[held] == label).sum().item() - share * labels.count(label)) < 1


@given(st.integers(2, 100), st.floats(0.01, 0.99), st.integers(0, 9))
def test_values_are_held_out_alike(rows, fraction, seed):
    train, held = hold_out(rows, fraction, seed, None)
    assert sorted([*train.tolist(), *held.tolist()]) == list(range(rows))
    again = hold_out(rows, fraction, seed, None)
    assert torch.equal(held, again[1])


@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
def test_a_fraction_is_the_run_of_the_remaining_rows(loss):
    x, y = problem(loss)
    weights = torch.rand(len(x))
    losses = []
    train, held = hold_out(len(x), 0.2, 3, y if loss == "cross_entropy" else None)
    for rows, validation in (
        (torch.arange(len(x)), 0.2),
        (train, (x[held], y[held])),
    ):
        torch.manual_seed(0)
        history = ol.fit(
            nn.Sequential(nn.Linear(7, 4)), x[rows], y[rows], epochs=2, seed=3, validation=validation, loss=loss,
            sample_weight=weights[rows].numpy(), engine="cpu", progress=False,
        )  # fmt: skip
        losses.append((history.losses, [epoch["validation"] for epoch in history.epochs]))
    assert losses[0] == losses[1]


def test_other_seeds_choose_other_rows():
    chosen = [hold_out(100, 0.3, seed, None)[1].numpy() for seed in range(3)]
    assert len(np.unique(np.concatenate(chosen))) > 50
