"""A user's `.csv` file: one column holds the targets, the others hold the features, which are numbers.

The separator is a comma, semicolon or tab, whichever the first line has most of. Whole numbers and words in the target column
are classes, in sorted order. Numbers with a decimal point are values to regress. The argument `values` overrides this: True
for values, False for classes, None to decide by the text.

The rows stream through the standard library's reader into one float32 buffer: 60,000 × 785 take about 10 s, and little
more memory than the result.
"""

from __future__ import annotations

import array
import csv
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

import numpy as np

from onelaunch.data.dataset import Dataset
from onelaunch.errors import DataError, suggest

TARGET_NAMES = ("target", "label", "y", "class")
WHOLE_NUMBER = re.compile(r"[+-]?[0-9]{1,18}")


def read_csv(path: Path, target: str | None, values: bool | None) -> Dataset:
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return _read(path, file, target, values)
    except UnicodeDecodeError:
        raise DataError(f"{path}: is not UTF-8 text: save it as a UTF-8 csv file") from None
    except csv.Error as error:
        raise DataError(f"{path}: is not a csv file ({error}): check its quotes, or save it again") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error}): check its permissions") from None


def _read(path: Path, file: TextIO, target: str | None, as_values: bool | None) -> Dataset:
    records = _records(file)
    head = list(itertools.islice(records, 2))
    if not head:
        raise DataError(f"{path}: is empty: pass a file with a header line and rows of numbers")
    first = [field.strip() for field in head[0][1]]
    header = _is_header(first, head[1][1] if len(head) == 2 else [], target)
    names = first if header else [str(column) for column in range(len(first))]
    column = _target_column(path, names, target, header)
    _check_names(path, names)
    rows = itertools.chain(head[1:] if header else head, records)

    features = names[:column] + names[column + 1 :]
    values, labels, lines = array.array("f"), [], array.array("q")
    for line, record in rows:
        if len(record) != len(names):
            raise DataError(
                f"{path}: line {line} has {len(record)} fields, the first line {len(names)}: make them the same"
            )
        label = record.pop(column).strip()
        if not label:
            _refuse(path, line, names[column], label)
        labels.append(label)
        lines.append(line)
        try:
            if not _is_plain("".join(record)) and not all(map(_is_number, record)):
                raise ValueError
            values.extend(map(float, record))
        except ValueError:
            wrong = next(index for index, field in enumerate(record) if not _is_number(field))
            _refuse(path, line, features[wrong], record[wrong].strip())
    if not labels:
        raise DataError(f"{path}: has a header line and no rows: add some")

    x = np.frombuffer(values, np.float32).reshape(len(labels), len(features))
    if not np.isfinite(x).all():
        row, wrong = np.argwhere(~np.isfinite(x))[0].tolist()
        _refuse(path, lines[row], features[wrong], str(x[row, wrong]))
    y, classes = _targets(path, names[column], labels, lines, as_values)
    what = f"{len(classes):,} classes" if classes else "values"
    heading = "" if header else ", no header line"
    source = f"{path}, {len(x):,} rows of {len(features):,}, {what} in column {names[column]!r}{heading}"
    return Dataset(path.name, source, x, y, classes=classes)


def _records(file: TextIO) -> Iterator[tuple[int, list[str]]]:
    """The line number and the fields of each line that is not blank."""
    first = re.sub(r'"[^"]*"', "", next((line for line in file if line.strip()), ""))
    file.seek(0)
    reader = csv.reader(file, delimiter=max(",;\t", key=first.count), strict=True)
    for record in reader:
        if len(record) > 1 or (record and record[0].strip()):
            yield reader.line_num, record


def _is_header(first: list[str], second: list[str], target: str | None) -> bool:
    """Whether the first line holds names. A name may be a number: pandas calls nameless columns 0, 1, 2, …"""
    numbers = [index for index, field in enumerate(first) if _is_number(field)]
    if not numbers or (len(numbers) > 2 and all(first[index] == str(index) for index in numbers)):
        return True
    if any(field == target or field.lower() in TARGET_NAMES for field in first if not _is_number(field)):
        return True
    return any(_is_number(below) and not _is_number(field) for field, below in zip(first, second, strict=False))


def _target_column(path: Path, names: list[str], target: str | None, header: bool) -> int:
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
    path: Path, name: str, labels: list[str], lines: Sequence[int], as_values: bool | None
) -> tuple[np.ndarray, tuple[str, ...] | None]:
    if as_values is False:
        labels = [_without_point(label) for label in labels]  # class numbers that were stored in a table of floats
    whole = [WHOLE_NUMBER.fullmatch(label) is not None for label in labels]
    if all(whole) and not as_values:
        return _classes([int(label) for label in labels])
    words = [index for index, label in enumerate(labels) if not _is_number(label)]
    if not words:
        with np.errstate(over="ignore"):
            y = np.array([float(label) for label in labels], np.float64).astype(np.float32)
        if not np.isfinite(y).all():
            row = int(np.argmin(np.isfinite(y)))
            _refuse(path, lines[row], name, labels[row])
        return y, None
    with_point = next((i for i, label in enumerate(labels) if not whole[i] and _is_number(label)), None)
    if with_point is not None:
        raise DataError(
            f"{path}: column {name!r} has the number {labels[with_point]!r} in line {lines[with_point]} and the word"
            f" {labels[words[0]]!r} in line {lines[words[0]]}: pass numbers alone (values) or names alone (classes)"
        )
    return _classes(labels)


def _classes(labels: list[Any]) -> tuple[np.ndarray, tuple[str, ...]]:
    """The index of each label among the sorted classes, and the names of the classes."""
    ordered = sorted(set(labels))
    index_of = {label: index for index, label in enumerate(ordered)}
    return np.array([index_of[label] for label in labels], np.int64), tuple(map(str, ordered))


def _without_point(label: str) -> str:
    """`3` for `3.00`; anything else unchanged."""
    whole, point, rest = label.partition(".")
    return whole if point and WHOLE_NUMBER.fullmatch(whole) and not rest.strip("0") else label


def _is_plain(text: str) -> bool:
    """Whether `float` reads the text as people do: Python's also takes 1_000 and the digits of other scripts."""
    return "_" not in text and text.isascii()


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return _is_plain(text.strip())


def _refuse(path: Path, line: int, column: str, value: str) -> NoReturn:
    where = f"{path}: line {line}, column {column!r}"
    if not value:
        raise DataError(f"{where}: the value is missing: fill it in, or remove the line")
    if _is_number(value):
        raise DataError(f"{where}: {value} is not a finite float32 number: remove or replace it")
    raise DataError(f"{where}: {value!r} is not a number: features must be numbers, so encode or remove the column")
