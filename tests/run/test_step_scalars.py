from __future__ import annotations

import numpy as np
import pytest

from onelaunch.run.spec import Spec
from onelaunch.run.step_scalars import step_scalars
from tests.pairwise import cases


@pytest.mark.parametrize(
    ("loss", "schedule", "drop_last"),
    cases(("cross_entropy", "mse", "bce_with_logits"), ("constant", "cosine"), (False, True)),
)
def test_rows_weights_and_rates_of_an_epoch(loss, schedule, drop_last):
    spec = Spec(
        rows=70, epochs=2, batch_size=32, optimizer="sgd", lr=0.3, loss=loss, schedule=schedule, drop_last=drop_last
    )
    first, count = spec.steps_per_epoch, spec.steps_per_epoch  # the second epoch
    scalars = step_scalars(spec, first, count, outputs=4)
    steps = range(first, first + count)
    assert {array.dtype for array in scalars.values()} == {np.dtype(np.float64)}
    assert scalars["rows"].tolist() == [spec.rows_of(step) for step in steps]
    values = 1 if loss == "cross_entropy" else 4
    assert scalars["row_weight"].tolist() == [1 / (spec.rows_of(step) * values) for step in steps]
    assert scalars["rate"].tolist() == [-spec.lr_at(step) for step in steps]
