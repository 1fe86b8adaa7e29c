"""The rows of each member: folds, given subsets, bootstrap samples or a held-out fraction."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from onelaunch.data.hold_out import HOLD_OUT_EPOCH
from onelaunch.errors import ArgumentTypeError, OnelaunchError, abbreviate, first_line, require_integer
from onelaunch.rng import MASK32, PERMUTATION_STREAM, permutation, philox
from onelaunch.train.hold_out import hold_out

FOLD_SEED = 0  # the folds are those of one permutation, the same for every member
BOOTSTRAP_STREAM = (
    PERMUTATION_STREAM - 1
)  # the last counter word of a bootstrap's draws; dropout layers count up from 0
Indices = torch.Tensor  # int64


@dataclass(frozen=True)
class Split:
    """Row numbers of the data: those to train on (None: all), and those to validate on (None: not from the data)."""

    train: Indices | None
    held: Indices | None


class Splits:
    """How the members' rows follow from the arguments. `count` splits per candidate and seed."""

    def __init__(self, rows: int, *, folds: Any, subsets: Any, bootstrap: Any, fraction: float | None) -> None:
        """`fraction`: of the rows to hold out, chosen by a member's seed as in `fit`."""
        given = [
            name for name, value in (("folds", folds), ("rows", subsets), ("validation", fraction)) if value is not None
        ]
        if folds is not None and len(given) > 1:
            raise OnelaunchError(f"folds and {given[1]} both say which rows to train on: pass one of the two")
        if not isinstance(bootstrap, bool):
            raise ArgumentTypeError(f"bootstrap={abbreviate(bootstrap)} must be True or False")
        folds = list(folds) if isinstance(folds, Iterator) else folds
        if isinstance(folds, Sequence) and not len(folds):
            raise OnelaunchError("folds=[] leaves nothing to train: pass a number of folds, or pairs of row numbers")
        self.rows, self.fraction, self.bootstrap = rows, fraction, bootstrap
        self._folds = folds
        self._fixed: list[Split] = []
        if subsets is not None:
            self._fixed = [
                Split(_indices(f"rows[{number}]", part, rows), None) for number, part in enumerate(_list(subsets))
            ]
        elif folds is not None and not _is_count(folds):
            self._fixed = [_pair(number, part, rows) for number, part in enumerate(folds)]
        elif folds is not None:
            self._folds = require_integer("folds", folds, "a number of folds, 2 or more")
            if not 2 <= self._folds <= rows:
                raise OnelaunchError(f"folds={folds} must be from 2 to the number of rows, {rows}")
        self.count = len(self._fixed) or (self._folds if folds is not None else 1)

    def given(self) -> list[Indices]:
        """The row numbers that the user has passed, or the number of folds."""
        if self._fixed:
            return [rows for split in self._fixed for rows in (split.train, split.held) if rows is not None]
        return [torch.tensor([self._folds or 0])]

    @property
    def validates(self) -> bool:
        """Whether validation rows are taken from the data."""
        return self._folds is not None or self.fraction is not None

    def key(self, split: int, seed: int) -> tuple[int, int]:
        """Equal for members that have the same rows."""
        by_seed = self.bootstrap or self.fraction is not None
        return split, seed if by_seed else -1

    def rows_of(self, split: int, seed: int, classes: torch.Tensor | None) -> Split:
        """The rows of a member. `classes`: int64 [rows] on the CPU for splits that keep the classes' proportions."""
        if self._folds is not None and not self._fixed:
            self._fixed = k_folds(self.rows, self._folds, classes)
        found = self._fixed[split] if self._fixed else Split(None, None)
        if self.fraction is not None:
            train = torch.arange(self.rows) if found.train is None else found.train
            inside, held = hold_out(len(train), self.fraction, seed, None if classes is None else classes[train])
            found = Split(train[inside], train[held])
        if self.bootstrap:
            train = torch.arange(self.rows) if found.train is None else found.train
            found = Split(train[bootstrap_rows(len(train), seed, split)], found.held)
        return found


def k_folds(rows: int, folds: int, classes: torch.Tensor | None) -> list[Split]:
    """`folds` splits of `rows` rows; each row is held out once. With `classes`, each fold has their proportions.

    Rows are dealt out to the folds in turn, in the order of `permutation(rows, 0, 2**61)`, sorted by class.
    """
    order = permutation(rows, FOLD_SEED, HOLD_OUT_EPOCH)
    if classes is not None:
        order = order[torch.argsort(classes[order], stable=True)]
    fold = torch.empty(rows, dtype=torch.int64)
    fold[order] = torch.arange(rows) % folds
    return [Split((fold != number).nonzero()[:, 0], (fold == number).nonzero()[:, 0]) for number in range(folds)]


def bootstrap_rows(rows: int, seed: int, split: int) -> Indices:
    """`rows` draws with replacement from `rows` rows, a function of the seed and the split."""
    words = philox((torch.arange(rows, dtype=torch.int64) & MASK32, split, 0, BOOTSTRAP_STREAM), seed)
    assert isinstance(words[0], torch.Tensor)
    return (words[0] * rows) >> 32


def _is_count(folds: Any) -> bool:
    return not isinstance(folds, Sequence | np.ndarray) or isinstance(folds, str)


def _list(subsets: Any) -> list[Any]:
    if isinstance(subsets, str) or not hasattr(subsets, "__len__") or not len(subsets):
        raise ArgumentTypeError(
            f"rows={abbreviate(subsets)} is not a list of arrays of row numbers: pass one per member"
        )
    if not hasattr(subsets[0], "__len__"):
        raise ArgumentTypeError("rows is one array of row numbers: pass a list of them, such as [rows]")
    return list(subsets)


def _pair(number: int, part: Any, rows: int) -> Split:
    if not isinstance(part, Sequence) or len(part) != 2:
        raise ArgumentTypeError(f"folds[{number}]={abbreviate(part)} is not a pair (training rows, validation rows)")
    name = f"folds[{number}]"
    return Split(_indices(f"{name}[0]", part[0], rows), _indices(f"{name}[1]", part[1], rows))


def _indices(name: str, values: Any, rows: int) -> Indices:
    array = np.asarray(values)
    if array.dtype == bool and array.shape == (rows,):
        array = np.flatnonzero(array)
    if array.ndim != 1 or array.dtype.kind not in "iu" or not len(array):
        raise ArgumentTypeError(f"{name}={abbreviate(values)} is not a vector of row numbers")
    if array.min() < 0 or array.max() >= rows:
        wrong = array[(array < 0) | (array >= rows)][0]
        raise OnelaunchError(f"{name} has row {wrong}: x has the rows 0 to {rows - 1}")
    return torch.from_numpy(array.astype(np.int64))


def pairs_of(splitter: Any, rows: int, y: torch.Tensor) -> list[Any]:
    """The pairs of row numbers of a splitter of scikit-learn."""
    try:
        return list(splitter.split(np.empty((rows, 0)), y.cpu().numpy()))
    except (ValueError, TypeError) as error:
        raise OnelaunchError(
            f"folds={abbreviate(splitter)} cannot split these rows ({first_line(error)}): pass its pairs of row numbers, "
            "such as GroupKFold(5).split(x, y, groups)"
        ) from None
