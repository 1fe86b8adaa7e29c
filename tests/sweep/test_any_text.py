"""Names and values of a grid that mean something to the libraries that print and draw them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import onelaunch as ol
from tests.sweep.models import make_model, rows


def made_from(value: Any = None, **named: Any) -> Any:
    return make_model()


@pytest.mark.parametrize("values", [
    ["[/red]", "[bold]b"],
    ["$x_{", "$\\\\frac$"],
    [torch.zeros(2), torch.ones(2)],
    [10**400, 1],
], ids=["markup", "formula", "tensors", "huge"])  # fmt: skip
def test_any_value_prints_and_draws(values, tmp_path):
    result = ol.sweep(made_from, *rows(), grid={"value": values}, epochs=1, progress=False)
    table = str(result.table)
    assert all(str(value) in table for value in values if len(str(value)) < 20)
    assert result.plot(tmp_path / "sweep.png").stat().st_size > 1000


def test_any_name_prints_and_draws(tmp_path):
    result = ol.sweep(made_from, *rows(), grid={"[/red]": [1, 2], "$_{$": [1, 2]}, epochs=1, progress=False)
    assert "[/red]" in str(result.table)
    assert "$_{$" in str(result.table)
    assert result.plot(tmp_path / "sweep.png").stat().st_size > 1000
