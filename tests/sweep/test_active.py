"""Callbacks of a sweep that change models: of the member that trains, and of the others."""

from __future__ import annotations

import pytest
from torch import nn

import onelaunch as ol
from tests.conftest import LOSS_TOLERANCE
from tests.reference import assert_same_course
from tests.train.acting_callbacks import CHANGES, data

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("strategy", ["grid", "halving"])
@pytest.mark.parametrize("name", ["halve", "drop_more", "freeze"])
def test_callbacks_of_a_sweep_may_change_every_model(name, strategy):
    def swept(**options):
        models = []

        def make_model(width):
            models.append(nn.Sequential(nn.Linear(7, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 4)))
            return models[-1]

        def act(history):
            if len(history.epochs) == 1:
                for model in models:
                    CHANGES[name](model)

        x, y = data()
        grid = {"width": [8, 16], "lr": [0.1, 0.05]}
        return ol.sweep(
            make_model, x, y, grid=grid, epochs=9, optimizer="sgd", validation=0.2, strategy=strategy, callbacks=[act],
            progress=False, **options,
        )  # fmt: skip

    expected, got = swept(engine="eager"), swept()
    for ours, theirs in zip(got.histories, expected.histories, strict=True):
        assert_same_course(ours.losses, theirs.losses, LOSS_TOLERANCE)
    if name == "freeze":
        assert {history.engine for history in got.histories} == {"eager"}
        with pytest.raises(ol.OnelaunchError, match=r"a callback changed requires_grad of 0\.weight: engine='cpu'"):
            swept(engine="cpu")
    else:
        assert {history.engine for history in got.histories} == {"cpu"}


def test_a_callback_must_not_unfreeze_what_models_share():
    x, y = data()
    shared = nn.Linear(7, 16).requires_grad_(False)
    with pytest.raises(ol.OnelaunchError, match=r"share 0\.weight, which training changes"):
        ol.sweep(
            lambda width: nn.Sequential(shared, nn.ReLU(), nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 4)), x, y,
            grid={"width": [8, 16]}, epochs=3, callbacks=[lambda history: shared.requires_grad_(True)], progress=False,
        )  # fmt: skip
