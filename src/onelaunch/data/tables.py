"""A user's table as arrays of numbers: one column holds the targets, the others hold the features, which must be numbers.

Whole numbers and words in the target column are classes, in sorted order. Numbers with a decimal point are values to regress.
The argument `values` overrides this: True for values, False for classes, None to decide by the text. Tables with text columns
or missing values need an encoder (`onelaunch.data.encoder`), as `onelaunch train` uses it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from onelaunch.data.dataset import Dataset
from onelaunch.data.table_file import TARGET_NAMES, Table, TableFile, decimal_comma, is_number, with_point
from onelaunch.data.table_values import number_of
from onelaunch.errors import DataError, suggest

WHOLE_NUMBER = re.compile(r"[+-]?[0-9]{1,18}")


def read_table(path: Path, target: str | None, values: bool | None) -> Dataset:
    """The rows of a table whose features are all numbers; raises DataError for text and for missing values."""
    file = TableFile(path, target)
    column = target_column(file, target)
    name = file.names[column]
    table = file.read(as_text=(name,))
    features = [index for index in range(len(table.names)) if index != column]
    x = np.stack([_feature(table, index) for index in features], axis=1)
    labels = [str(label) for label in table.columns[column]]
    if "" in labels:
        _refuse(table, labels.index(""), name, "")
    y, classes = _targets(table, name, labels, values)
    what = f"{len(classes):,} classes" if classes else "values"
    heading = "" if table.header else ", no header line"
    source = f"{path}, {len(x):,} rows of {len(features):,}, {what} in column {name!r}{heading}"
    return Dataset(path.name, source, x, y, classes=classes)


def _feature(table: Table, index: int) -> np.ndarray:
    """A column as float32; raises DataError unless all its values are finite numbers."""
    column, name = table.columns[index], table.names[index]
    if column.dtype == object:
        found = [number_of(text) for text in column]
        if None in found:
            row = found.index(None)
            _refuse(table, row, name, column[row])
        column = np.array(found, np.float64)
    with np.errstate(over="ignore"):
        numbers = column.astype(np.float32)
    if not np.isfinite(numbers).all():
        row = int(np.argmin(np.isfinite(numbers)))
        _refuse(table, row, name, "" if np.isnan(numbers[row]) else str(numbers[row]))
    return numbers


def target_column(file: TableFile, target: str | None) -> int:
    """The index of the target column: the one that is called or numbered `target`, or the one named in TARGET_NAMES.

    Raises DataError if there is no such column or more than one, and for a table with a single or a nameless column.
    """
    path, names = file.path, list(file.names)
    column = _find_target(path, names, target, file.header)
    _check_names(path, names)
    return column


def _find_target(path: Path, names: list[str], target: str | None, header: bool) -> int:
    listed = ", ".join(map(repr, names[:8])) + (f" … ({len(names)} in all)" if len(names) > 8 else "")
    if target is None:
        found = [index for index, name in enumerate(names) if name.lower() in TARGET_NAMES]
        if len(found) == 1:
            return found[0]
        what = f"{len(found)} columns are" if found else "no column is"
        if not header:
            raise DataError(f"{path}: has no header line: pass target as an index from 0 to {len(names) - 1}")
        raise DataError(f"{path}: {what} called {', '.join(TARGET_NAMES)}: pass target as one of {listed}")
    if names.count(target) > 1:
        raise DataError(f"target={target!r}: {path} has {names.count(target)} columns of that name: pass its index")
    if target in names:
        return names.index(target)
    if WHOLE_NUMBER.fullmatch(target) and -len(names) <= int(target) < len(names):
        return int(target) % len(names)
    raise DataError(f"target={target!r}: {path} has no such column: pass one of {listed}{suggest(target, names)}")


def _check_names(path: Path, names: list[str]) -> None:
    if len(names) < 2:
        raise DataError(f"{path}: has a single column: features and a target, separated by , ; or tab, are needed")
    if "" in names:
        raise DataError(
            f"{path}: column {names.index('')} of the header has no name: name or remove it (pandas: index=False)"
        )


def _targets(
    table: Table, name: str, labels: list[str], as_values: bool | None
) -> tuple[np.ndarray, tuple[str, ...] | None]:
    if as_values is False:
        labels = [without_point(label) for label in labels]  # class numbers that were stored in a table of floats
    whole = [WHOLE_NUMBER.fullmatch(label) is not None for label in labels]
    if all(whole) and not as_values:
        return sorted_classes([int(label) for label in labels])
    words = [index for index, label in enumerate(labels) if not is_number(label)]
    if not words:
        with np.errstate(over="ignore"):
            y = np.array([float(label) for label in labels], np.float64).astype(np.float32)
        if not np.isfinite(y).all():
            row = int(np.argmin(np.isfinite(y)))
            _refuse(table, row, name, labels[row])
        return y, None
    with_point = next((i for i, label in enumerate(labels) if not whole[i] and is_number(label)), None)
    if with_point is not None:
        number, word = (f"{labels[row]!r} in {table.unit} {table.lines[row]}" for row in (with_point, words[0]))
        raise DataError(
            f"{table.path}: column {name!r} has the number {number} and the word {word}: pass numbers alone (values) or names "
            "alone (classes)"
        )
    return sorted_classes(labels)


def sorted_classes(labels: Sequence[Any]) -> tuple[np.ndarray, tuple[str, ...]]:
    """The index of each label among the sorted classes, and the names of the classes."""
    ordered = sorted(set(labels))
    index_of = {label: index for index, label in enumerate(ordered)}
    return np.array([index_of[label] for label in labels], np.int64), tuple(map(str, ordered))


def without_point(label: str) -> str:
    """`3` for `3.00`; anything else unchanged."""
    whole, point, rest = label.partition(".")
    return whole if point and WHOLE_NUMBER.fullmatch(whole) and not rest.strip("0") else label


def _refuse(table: Table, row: int, column: str, value: str) -> NoReturn:
    where = table.place(row, column)
    if not value:
        raise DataError(f"{where}: the value is missing: fill it in, or remove the line")
    if is_number(value):
        raise DataError(f"{where}: {value} is not a finite float32 number: remove or replace it")
    if decimal_comma([value]):
        raise DataError(f"{where}: {value!r} has a decimal comma, which makes it text: write {with_point(value)}")
    raise DataError(f"{where}: {value!r} is not a number: features must be numbers, so encode or remove the column")
