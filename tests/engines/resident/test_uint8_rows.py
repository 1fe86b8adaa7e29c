"""Floats that are whole multiples of 1/255 are converted to uint8, and no others."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from onelaunch.engines.contract import Run
from onelaunch.engines.resident.uint8_rows import FIRST_ROWS, as_uint8, with_uint8_rows
from onelaunch.run.objective import as_features
from onelaunch.train.inputs import make_run

LEVELS = torch.arange(256, dtype=torch.uint8)


def run_of(x: torch.Tensor, validation_x: torch.Tensor | None = None) -> Run:
    target = torch.zeros(len(x), dtype=torch.int64)
    validation = None if validation_x is None else (validation_x, target[: len(validation_x)])
    return make_run(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), x, target, validation, {"steps": 1})


def test_every_byte_is_recovered_however_it_was_divided():
    for made in (
        LEVELS / 255,
        LEVELS.float().div(255),
        (LEVELS.double() / 255).float(),
        as_features(LEVELS, torch.float32),
    ):
        found = as_uint8(made)
        assert found is not None
        assert found.equal(LEVELS)


@pytest.mark.parametrize("value", [1 / 254, -1 / 255, 256 / 255, 1e-9, float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("row", [0, 3 * FIRST_ROWS - 1])
def test_one_other_number_keeps_the_floats(value, row):
    x = torch.randint(256, (3 * FIRST_ROWS, 4)) / 255
    assert as_uint8(x) is not None
    x[row, 2] = value
    assert as_uint8(x) is None


def test_many_rows_are_converted_part_by_part(monkeypatch):
    monkeypatch.setattr("onelaunch.engines.resident.uint8_rows.NUMBERS_AT_ONCE", 40)
    numbers = torch.randint(256, (101, 3, 5)).to(torch.uint8)
    found = as_uint8(numbers / 255)
    assert found is not None
    assert found.equal(numbers)
    x = numbers / 255
    x[-1, -1, -1] = 0.3
    assert as_uint8(x) is None


@given(st.lists(st.floats(-2, 2, width=32), min_size=4, max_size=40))
def test_a_conversion_is_exact(values):
    x = torch.tensor(values)
    found = as_uint8(x)
    if found is not None:
        assert as_features(found, torch.float32).equal(x)


def test_a_run_is_converted_as_a_whole_or_not_at_all():
    images, others = torch.randint(256, (6, 2, 2)) / 255, torch.rand(6, 2, 2)
    plain = run_of(images)
    assert with_uint8_rows(plain).x.dtype == torch.uint8
    assert with_uint8_rows(plain).x.shape == images.shape
    assert with_uint8_rows(plain).model is plain.model
    both = with_uint8_rows(run_of(images, images[:3]))
    assert both.validation is not None
    assert both.x.dtype == both.validation[0].dtype == torch.uint8
    for run in (run_of(others), run_of(images, others[:3]), run_of(others, images[:3])):
        assert with_uint8_rows(run) is run
    already_uint8 = run_of((images * 255).round().to(torch.uint8))
    assert with_uint8_rows(already_uint8) is already_uint8
    assert as_uint8(images.bfloat16()) is None
