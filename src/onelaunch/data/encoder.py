"""Turns the columns of a table into a network's inputs and back: scaled numbers, one-hot categories, imputed missing values.

The inputs of a row are, in this order: the scaled numeric columns with their ramps (0 for a missing value), one 0/1 flag for
each numeric column that had missing values in training, and the one-hot code of each text column. A missing text is a
category of its own if training had one. A category that training did not have is encoded as zeros. A column of ISO dates is
numeric: days since 1970-01-01.

Everything an encoder knows is plain data: `to_json` and `from_json`, never pickle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from onelaunch.data.scaling import FeatureScaling
from onelaunch.data.table_file import Table, decimal_comma, is_number, text_column, with_point
from onelaunch.data.table_values import Positions, days_of, number_of, text_of
from onelaunch.data.text_columns import MAX_CATEGORIES, categories_of, date_in, has_dates
from onelaunch.errors import DataError, abbreviate_list, suggest

FORMAT = 1
MAX_INPUTS = 1 << 16
MOSTLY_NUMBERS = 0.9  # a text column with at least this fraction of numbers is a numeric column with a mistake in it


@dataclass(frozen=True)
class TableEncoder:
    numbers: tuple[str, ...]  # names of the numeric columns
    scaling: FeatureScaling  # of these columns
    flagged: tuple[int, ...]  # the indices in `numbers` of the columns with a flag for missing values
    categories: Mapping[str, tuple[str, ...]]  # by text column, in the order of the file: its categories, sorted
    left_out: Mapping[str, str]  # by column that is not used: the reason
    dates: tuple[str, ...] = ()  # the names in `numbers` of the columns of dates

    @classmethod
    def fit(
        cls, table: Table, columns: Iterable[str], categorical: Iterable[str] = (), dates: Iterable[str] | None = None
    ) -> TableEncoder:
        """The encoder of these columns of `table`; the columns in `categorical` may consist of numbers.

        dates: the columns of dates, as `date_columns` finds them; None finds them in `table`.
        Raises DataError for a repeated name, an infinite number, text in a numeric column, or no usable column.
        """
        columns, categorical = list(columns), set(categorical)
        check_columns(table, columns, categorical)
        dates = set(date_columns(table, columns, categorical) if dates is None else dates)
        numbers: dict[str, np.ndarray] = {}
        flagged: list[int] = []
        categories: dict[str, tuple[str, ...]] = {}
        left_out: dict[str, str] = {}
        for name in columns:
            column = _as_numbers(table, name, True) if name in dates else table.column(name)
            if name in categorical and column.dtype != object:  # of a table in memory
                column = text_column(_texts(column))
            if column.dtype == object:
                found = categories_of(column)
                if isinstance(found, str):
                    left_out[name] = found
                else:
                    categories[name] = found
                continue
            reason = _unusable_reason(column)
            if reason:
                left_out[name] = reason
                continue
            if np.isnan(column).any():
                flagged.append(len(numbers))
            numbers[name] = column
        if len(numbers) > MAX_INPUTS:
            _refuse_inputs(table, len(numbers), left_out)
        scaling = FeatureScaling.fit(np.stack([*numbers.values()], axis=1) if numbers else np.empty((len(table), 0)))
        used = tuple(name for name in numbers if name in dates)
        encoder = cls(tuple(numbers), scaling, tuple(flagged), categories, left_out, used)
        if not 1 <= encoder.inputs <= MAX_INPUTS:
            _refuse_inputs(table, encoder.inputs, left_out)
        return encoder

    @property
    def inputs(self) -> int:
        """The number of inputs that a row has after encoding."""
        return self.scaling.outputs + len(self.flagged) + sum(map(_width, self.categories.values()))

    @property
    def input_names(self) -> tuple[str, ...]:
        """The name of each input, in the order of `transform`: `age`, `age ramp 1`, `age missing`, `colour=red`.

        The input of a column with two categories is called after the second one, for which it is 1.
        """
        ramps: Counter[str] = Counter()
        names = list(self.numbers)
        for column in self.scaling.ramp_column.tolist():
            ramps[self.numbers[column]] += 1
            names.append(f"{self.numbers[column]} ramp {ramps[self.numbers[column]]}")
        names += [f"{self.numbers[index]} missing" for index in self.flagged]
        for name, found in self.categories.items():
            names += [f"{name}={text}" if text else f"{name} missing" for text in found[-_width(found) :]]
        return tuple(names)

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns that are used."""
        return (*self.numbers, *self.categories)

    def transform(self, table: Table) -> np.ndarray:
        """The inputs of the table's rows, float32 [rows, inputs]. Columns are found by name, further ones are ignored.

        Raises DataError for a missing or repeated column, for text in a numeric column and for an infinite number.
        """
        numbers, codes = self.parts(table)
        flags = np.isnan(numbers[:, list(self.flagged)]).astype(np.float32)
        parts = [self.scaling.transform(numbers), flags]
        parts += [one_hot(codes[:, i], _width(found)) for i, found in enumerate(self.categories.values())]
        return np.concatenate(parts, axis=1)

    def parts(self, table: Table) -> tuple[np.ndarray, np.ndarray]:
        """The table's numbers, float64 [rows, numeric columns], and its categories as int64 [rows, text columns].

        A category is its position in `categories`; -1 means one that training did not have.
        """
        absent = [name for name in self.columns if name not in table.index]
        if absent:
            hint = suggest(absent[0], table.names) if len(absent) == 1 else ""
            raise DataError(
                f"{table.path}: lacks the column(s) {abbreviate_list([*map(repr, absent)])}: add them{hint}"
            )
        _check_names(table, self.columns)
        numbers = np.empty((len(table), len(self.numbers)))
        for index, name in enumerate(self.numbers):
            numbers[:, index] = _as_numbers(table, name, name in self.dates)
        codes = np.empty((len(table), len(self.categories)), np.int64)
        for index, (name, found) in enumerate(self.categories.items()):
            positions = Positions(found)
            codes[:, index] = [positions[text] for text in _texts(table.column(name))]
        return numbers, codes

    def unseen(self, table: Table) -> dict[str, int]:
        """By text column: how many rows have a category that training did not have, where there are any."""
        if not self.categories:
            return {}
        counts = (self.parts(table)[1] < 0).sum(axis=0).tolist()
        return {name: count for name, count in zip(self.categories, counts, strict=True) if count}

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know of the columns, one line each: which are not used, and which are text by mistake."""
        found = [f"column {name!r} is not used: it {reason}" for name, reason in self.left_out.items()]
        for name, categories in self.categories.items():
            if text := decimal_comma(categories):
                found.append(decimal_comma_note(name, text))
            if text := date_in(categories):
                found.append(
                    f"column {name!r} is text, as {text!r} is a date: write dates as 2024-05-31, or leave it out"
                )
            elif len(categories) == MAX_CATEGORIES:
                found.append(f"column {name!r} has many categories: the {MAX_CATEGORIES} most frequent ones are used")
        return tuple(found)

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "numbers": list(self.numbers),
            "scaling": self.scaling.to_json(),
            "flagged": list(self.flagged),
            "categories": {name: list(found) for name, found in self.categories.items()},
            "left_out": dict(self.left_out),
            "dates": list(self.dates),
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> TableEncoder:
        """The encoder that `to_json` described; raises KeyError, TypeError or ValueError if it did not."""
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']}, this version reads {FORMAT}")
        scaling = FeatureScaling.from_json(content["scaling"])
        numbers = tuple(map(str, content["numbers"]))
        flagged = tuple(map(int, content["flagged"]))
        dates = tuple(map(str, content.get("dates", ())))  # an older version wrote none
        known = all(0 <= i < len(numbers) for i in flagged) and all(name in numbers for name in dates)
        if len(scaling.center) != len(numbers) or not known:
            raise ValueError("the lengths of its lists do not match")
        categories = {str(name): tuple(map(str, found)) for name, found in content["categories"].items()}
        return cls(numbers, scaling, flagged, categories, dict(content["left_out"]), dates)


def check_columns(table: Table, columns: Iterable[str], categorical: Iterable[str] = ()) -> None:
    """Raise DataError for a repeated name, an infinite number, and text in a numeric column.

    Call it before a table is divided: one part may hold the only word in a column of numbers.
    """
    columns = list(columns)
    _check_names(table, columns)
    for name in columns:
        if table.column(name).dtype != object:
            _refuse_infinite(table, name, table.column(name))
        elif name not in categorical:
            _refuse_mistakes(table, name)


def date_columns(table: Table, columns: Iterable[str], categorical: Iterable[str] = ()) -> tuple[str, ...]:
    """The columns of ISO dates, but for those in `categorical`. Call it before a table is divided, as `check_columns`."""
    return tuple(name for name in columns if name not in categorical and has_dates(table.column(name)))


def check_categorical(where: str, names: Sequence[str], categorical: Iterable[str]) -> None:
    """Raise DataError for a name in `categorical` that is not among the names of the columns. where: the table's name."""
    for name in categorical:
        if name not in names:
            raise DataError(f"categorical={name!r}: {where} has no such column{suggest(name, names)}")


def decimal_comma_note(name: str, text: str) -> str:
    """What a user should know of a column with decimal commas, such as that of `text`."""
    return f"column {name!r} is text, as {text!r} has a decimal comma: for numbers write {with_point(text)}"


def one_hot(codes: np.ndarray, width: int) -> np.ndarray:
    """float32 [rows, width]: 1 at a row's code, zeros for -1. With width 1: -1 and 1 for the codes 0 and 1, 0 for -1."""
    if width == 1:
        return np.where(codes < 0, 0, 2 * codes - 1).astype(np.float32)[:, None]
    return (codes[:, None] == np.arange(width)).astype(np.float32)


def _refuse_inputs(table: Table, inputs: int, left_out: Mapping[str, str]) -> NoReturn:
    reasons = "; ".join(f"{name!r} {reason}" for name, reason in list(left_out.items())[:3])
    more = f"; and {len(left_out) - 3} more" if len(left_out) > 3 else ""
    few = f"no column that says anything ({reasons}{more}): add or correct one"
    many = f"{inputs:,} inputs after encoding, more than {MAX_INPUTS:,}: leave out columns"
    raise DataError(f"{table.path}: has {many if inputs else few}")


def _width(categories: tuple[str, ...]) -> int:
    return 1 if len(categories) == 2 else len(categories)


def _texts(column: np.ndarray) -> list[str]:
    """The fields of a text column. A column of numbers has the texts that the same numbers have in a text column."""
    if column.dtype == object:
        return column.tolist()
    return [text_of(value) for value in column.tolist()]


def _unusable_reason(column: np.ndarray) -> str:
    present = column[~np.isnan(column)]
    if not len(present):
        return "has no value"
    return "is constant" if len(present) == len(column) and (present == present[0]).all() else ""


def _as_numbers(table: Table, name: str, is_date: bool) -> np.ndarray:
    """The column as finite numbers with NaN: 1 and 0 for booleans, days for dates; raises DataError for a word."""
    column = table.column(name)
    if column.dtype == object or is_date:
        texts = _texts(column)
        numbers = [days_of(text) if is_date else number_of(text) for text in texts]
        if None in numbers:
            row, kind = numbers.index(None), "date such as 2024-05-31" if is_date else "number"
            raise DataError(f"{table.place(row, name)}: {texts[row]!r} is not a {kind}, as in training: correct it")
        column = np.array(numbers, np.float64)
    _refuse_infinite(table, name, column)
    return column


def _refuse_infinite(table: Table, name: str, column: np.ndarray) -> None:
    infinite = np.isinf(column)
    if infinite.any():
        row = int(np.argmax(infinite))
        raise DataError(f"{table.place(row, name)}: {column[row]} is not a finite number: correct or empty it")


def _refuse_mistakes(table: Table, name: str) -> None:
    """Refuse a text column that is nearly all numbers: more likely a typing error than a set of categories."""
    column = table.column(name)
    present = sum(1 for text in column if text)
    numeric = sum(map(is_number, column))
    if present > numeric >= MOSTLY_NUMBERS * present:
        row = next(row for row, text in enumerate(column) if text and not is_number(text))
        raise DataError(
            f"{table.place(row, name)}: {column[row]!r} is not a number, but {numeric:,} of {present:,} values are: "
            f"correct or empty it, or pass categorical={name!r} to read the column as categories"
        )


def _check_names(table: Table, names: Iterable[str]) -> None:
    counts = Counter(table.names)
    repeated = [name for name in names if counts[name] > 1]
    if repeated:
        raise DataError(f"{table.path}: has {counts[repeated[0]]} columns called {repeated[0]!r}: rename all but one")
