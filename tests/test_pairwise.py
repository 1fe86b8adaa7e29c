"""The pairwise parameter sets of the other tests."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests import pairwise


@pytest.mark.parametrize("sizes", [(3, 3, 7, 4), (2, 2, 2), (1, 5, 3), (6, 2, 3, 2, 3), (4, 4)])
def test_every_pair_of_values_meets(monkeypatch, sizes):
    monkeypatch.setattr(pairwise, "ALL_CASES", False)
    axes = [[f"{axis}{value}" for value in range(size)] for axis, size in enumerate(sizes)]
    rows = pairwise.cases(*axes)
    assert len(rows) == len(set(rows))
    for one, other in combinations(range(len(sizes)), 2):
        assert {(row[one], row[other]) for row in rows} == set(product(axes[one], axes[other]))
    assert len(rows) <= 2 * max(a * b for a, b in combinations(sizes, 2))


def test_all_cases_is_the_full_product(monkeypatch):
    monkeypatch.setattr(pairwise, "ALL_CASES", True)
    assert pairwise.cases([1, 2], [3, 4], [5, 6]) == list(product([1, 2], [3, 4], [5, 6]))
