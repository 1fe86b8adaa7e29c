"""The target column of a table: whether it is to be classified or regressed, and how it becomes a network's target and back.

Text is classified. Numbers are classified if they are whole and few (at most MAX_NUMBERED_CLASSES different ones), else
regressed; `task` overrides this. Regression targets are standardised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onelaunch.data.scaling import TargetScaling
from onelaunch.data.table_file import Table, decimal_comma, is_number, with_point
from onelaunch.data.table_values import BOOLEANS, WHOLE_NUMBER, Positions, number_of, plain
from onelaunch.errors import DataError, abbreviate_list

MAX_NUMBERED_CLASSES = 20  # with more different whole numbers, a column is a quantity


@dataclass(frozen=True)
class TableTarget:
    name: str
    classes: tuple[str, ...] | None  # of a classification, in the order of the network's outputs
    scaling: TargetScaling | None  # of a regression

    @classmethod
    def fit(cls, table: Table, name: str, task: str | None = None) -> TableTarget:
        """The target in column `name`, which is a text column. Raises DataError for a missing value, a single class,
        numbers where `task` asks for classes of which nearly every row has its own, and text where it asks for numbers."""
        labels = _labels(table, name)
        words = next((row for row, label in enumerate(labels) if not is_number(label)), None)
        if task is None:
            whole = words is None and all(map(WHOLE_NUMBER.fullmatch, labels))
            few = whole and len({float(label) for label in labels}) <= MAX_NUMBERED_CLASSES
            task = "classification" if words is not None or few else "regression"
        if task == "regression":
            if words is not None:
                remedy = (
                    f"write {with_point(commas)}"
                    if (commas := decimal_comma(labels[words : words + 1]))
                    else "correct it"
                )
                raise DataError(
                    f"{table.place(words, name)}: {labels[words]!r} is not a number: {remedy}, or pass "
                    "task='classification'"
                )
            return cls(name, None, TargetScaling.fit(_numbers(table, name, labels)[:, None]))
        classes = _classes(labels)
        if len(classes) == 1:
            raise DataError(
                f"{table.path}: column {name!r} has a single class, {classes[0]!r}: pass rows of two or more"
            )
        if len(classes) > max(MAX_NUMBERED_CLASSES, len(labels) // 2):
            numbers = "pass task='regression' to predict numbers" if words is None else "pass another target"
            if commas := decimal_comma(labels):
                numbers = (
                    f"its numbers have decimal commas, which make them text: write {with_point(commas)} for {commas}"
                )
            raise DataError(
                f"{table.path}: column {name!r} has {len(classes):,} classes in {len(labels):,} rows, too few of each to "
                f"learn: {numbers}"
            )
        return cls(name, classes, None)

    @property
    def task(self) -> str:
        return "regression" if self.classes is None else "classification"

    @property
    def outputs(self) -> int:
        """The number of outputs of the network."""
        return 1 if self.classes is None else len(self.classes)

    def values(self, table: Table) -> np.ndarray:
        """The targets of the table's rows: int64 class numbers, or float64 numbers in the units of the file.

        Raises DataError for a missing value, for a class that training did not have, and for text in place of a number.
        """
        labels = _labels(table, self.name)
        if self.classes is None:
            return _numbers(table, self.name, labels)
        codes = Positions(self.classes)
        for row, label in enumerate(labels):
            if codes[label] < 0:
                known = f"training had {abbreviate_list([*map(repr, self.classes)])}"
                raise DataError(f"{table.place(row, self.name)}: {label!r} is a class that is not known: {known}")
        return np.array([codes[label] for label in labels], np.int64)

    def encode(self, values: np.ndarray) -> np.ndarray:
        """What the network learns: the class numbers, or standardised float32 numbers [rows, 1]."""
        return values if self.scaling is None else self.scaling.transform(values[:, None])

    def to_json(self) -> dict[str, Any]:
        scaling = None if self.scaling is None else [float(self.scaling.mean[0]), float(self.scaling.deviation[0])]
        return {"name": self.name, "classes": None if self.classes is None else list(self.classes), "scaling": scaling}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> TableTarget:
        """The target that `to_json` described; raises KeyError, TypeError or ValueError if it did not."""
        classes, scaling = content["classes"], content["scaling"]
        if (classes is None) == (scaling is None):
            raise ValueError("it has classes and a scaling, or neither")
        if scaling is None:
            return cls(str(content["name"]), tuple(map(str, classes)), None)
        mean, deviation = (np.array([float(number)]) for number in scaling)
        return cls(str(content["name"]), None, TargetScaling(mean, deviation))


def _labels(table: Table, name: str) -> list[str]:
    column = table.column(name)
    labels: list[str] = column.tolist() if column.dtype == object else [_text(value) for value in column.tolist()]
    if "" in labels:
        raise DataError(f"{table.place(labels.index(''), name)}: the target is missing: fill it in, or remove the row")
    return labels


def _text(number: float) -> str:
    return "" if np.isnan(number) else repr(number)


def _numbers(table: Table, name: str, labels: Sequence[str]) -> np.ndarray:
    numbers = [number_of(label) for label in labels]
    wrong = next((row for row, number in enumerate(numbers) if number is None or not np.isfinite(number)), None)
    if wrong is not None:
        raise DataError(f"{table.place(wrong, name)}: {labels[wrong]!r} is not a finite number: correct it")
    return np.array(numbers, np.float64)


def _classes(labels: Sequence[str]) -> tuple[str, ...]:
    """The different labels, sorted: as numbers if all of them are. Booleans are spelled as in the file if it has one way."""
    written = {label if label.lower() in BOOLEANS else plain(label) for label in labels}
    found = {plain(label) for label in written}
    if len(found) == len(written):
        found = written
    return tuple(
        sorted(found, key=lambda label: (float(label), label)) if all(map(is_number, found)) else sorted(found)
    )
