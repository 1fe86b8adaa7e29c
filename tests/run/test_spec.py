"""The arithmetic of a run: epochs, batches, learning rates, and the round trip through a checkpoint."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onelaunch.errors import OnelaunchError
from onelaunch.run.spec import MAX_STEPS, Spec


@given(rows=st.integers(1, 50), batch=st.integers(1, 60), epochs=st.integers(1, 4), drop_last=st.booleans())
def test_an_epoch_visits_its_rows_once(rows, batch, epochs, drop_last):
    if drop_last and batch > rows:
        return
    spec = Spec(rows=rows, epochs=epochs, batch_size=batch, drop_last=drop_last)
    for epoch in range(epochs):
        steps = range(epoch * spec.steps_per_epoch, (epoch + 1) * spec.steps_per_epoch)
        visited = [row for step in steps for row in range(rows)[spec.batch_slice(step)]]
        assert visited == list(range(rows - rows % batch if drop_last else rows))
        assert {spec.epoch_of(step) for step in steps} == {epoch}
        assert {spec.epoch_end(step) for step in steps} == {steps.stop}
        assert sum(spec.rows_of(step) for step in steps) == len(visited)
    assert spec.total_steps == epochs * spec.steps_per_epoch


def test_a_run_of_steps_may_end_within_an_epoch():
    spec = Spec(rows=100, steps=7, batch_size=20, schedule="linear", lr=0.7)
    assert spec.total_steps == spec.epoch_end(6) == 7
    assert [spec.lr_at(step) for step in range(7)] == pytest.approx([0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1])


def test_a_spec_survives_json():
    spec = Spec(rows=8, epochs=2, optimizer="lion", weight_decay=0.1)
    assert Spec(**json.loads(json.dumps(spec.to_dict()))) == spec


def test_a_run_that_the_dropout_counter_cannot_number_is_refused():
    assert Spec(rows=8, steps=MAX_STEPS).total_steps == MAX_STEPS
    with pytest.raises(OnelaunchError, match="too long"):
        Spec(rows=8, steps=MAX_STEPS + 1)


def test_an_argument_of_other_optimizers_is_refused():
    with pytest.raises(
        OnelaunchError, match=r"momentum=0.9 belongs to optimizer='sgd' or 'rmsprop': leave it out, 'lion'"
    ):
        Spec(rows=8, steps=1, optimizer="lion", momentum=0.9)
    with pytest.raises(OnelaunchError, match=r"nesterov=True belongs to optimizer='sgd': leave it out, 'rmsprop'"):
        Spec(rows=8, steps=1, optimizer="rmsprop", nesterov=True)
