"""Parameter combinations for tests: every pair of values of two axes by default, the full product with `--all-cases`.

Most faults need at most two options to meet. A pairwise set of 3 x 3 x 7 x 4 options has 28 cases instead of 252.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

ALL_CASES = False  # set by conftest.py before test modules are imported


def cases(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Tuples with one value per axis, in which every two values of different axes meet at least once."""
    if ALL_CASES or len(axes) < 3:
        return list(product(*axes))
    sizes = [len(axis) for axis in axes]
    return [tuple(axis[choice] for axis, choice in zip(axes, row, strict=True)) for row in _covering(sizes)]


def _covering(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Rows of indices that cover all pairs, found greedily; the same on every machine."""
    left = {
        ((one, a), (other, b))
        for one, other in combinations(range(len(sizes)), 2)
        for a, b in product(range(sizes[one]), range(sizes[other]))
    }
    rows = []
    while left:
        row: dict[int, int] = dict(min(left))
        while len(row) < len(sizes):
            # Of all values still open, the one that meets most uncovered partners; the smallest on a tie.
            axis, value = max(
                ((axis, value) for axis in range(len(sizes)) if axis not in row for value in range(sizes[axis])),
                key=lambda choice: (len(_pairs(choice, row) & left), -choice[0], -choice[1]),
            )
            row[axis] = value
        left -= {pair for axis in row for pair in _pairs((axis, row[axis]), row)}
        rows.append(tuple(row[axis] for axis in range(len(sizes))))
    return rows


def _pairs(choice: tuple[int, int], row: dict[int, int]) -> set[tuple[tuple[int, int], tuple[int, int]]]:
    return {(min(choice, other), max(choice, other)) for other in row.items() if other[0] != choice[0]}
