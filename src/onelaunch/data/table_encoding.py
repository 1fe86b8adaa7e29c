"""A table as a Dataset: encoded by what its training rows alone say, together with the means to encode new rows alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onelaunch.data.dataset import Dataset, held_out_rows
from onelaunch.data.encoder import TableEncoder, check_categorical, check_columns, date_columns
from onelaunch.data.table_file import MISSING, Table, TableFile, column_of
from onelaunch.data.table_target import TableTarget
from onelaunch.data.tables import target_column
from onelaunch.errors import ArgumentTypeError, DataError, abbreviate_list


@dataclass(frozen=True)
class TableEncoding:
    """How the rows of a table become inputs, and its target column becomes targets."""

    encoder: TableEncoder
    target: TableTarget
    header: bool = True  # False: columns have no names, and are found by their positions

    def read(self, data: Any) -> Table:
        """The rows to predict, from anything that `as_table` takes.

        Raises DataError for a file without a header line whose columns cannot be those of training.
        """
        table = as_table(data, self.text_columns, header=None if self.header else False)
        if table.header:
            return table
        used, columns = self.encoder.columns, len(self.encoder.columns) + len(self.encoder.left_out) + 1
        if self.header and any(name not in table.index for name in used):
            raise DataError(
                f"{table.path}: has no header line, and columns are found by name: add one with the columns "
                f"{abbreviate_list([*map(repr, used)])}"
            )
        last = self.target.name == str(columns - 1)
        if not self.header and len(table.names) not in (columns, columns - last):
            place = f"column {self.target.name}, the target, may be {'missing' if last else 'any text, such as ?'}"
            raise DataError(
                f"{table.path}: has {len(table.names)} columns and training had {columns}, without a header line: pass the "
                f"same columns in the same order; {place}"
            )
        return table

    @property
    def text_columns(self) -> tuple[str, ...]:
        """The columns that must be read as text, if a file has them."""
        return (*self.encoder.categories, self.target.name)

    def to_json(self) -> dict[str, Any]:
        return {"encoder": self.encoder.to_json(), "target": self.target.to_json(), "header": self.header}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> TableEncoding:
        """The encoding that `to_json` described; raises KeyError, TypeError or ValueError if it did not."""
        encoder, target = TableEncoder.from_json(content["encoder"]), TableTarget.from_json(content["target"])
        return cls(encoder, target, bool(content.get("header", True)))


def load_table(
    path: Path, *, target: str | None, task: str | None, categorical: Sequence[str], fraction: float, seed: int,
    stratify: bool = True,
) -> Dataset:  # fmt: skip
    """The rows of the file, encoded, with `fraction` of them held out as its test part.


    target: name or index of the target column; None finds a column called target, label, y or class.
    task: "classification", "regression", or None to infer it from the target. categorical: columns of numbers that are names.
    stratify: classes have the same proportions in both parts.
    """
    if not path.is_file():
        raise DataError(f"{path}: {'is not a file' if path.exists() else 'no such file'}: check the path")
    file = TableFile(path, target)
    name = file.names[target_column(file, target)]
    check_categorical(str(path), file.names, categorical)
    table = file.read(as_text=(name, *categorical))
    return encode_table(table, name, task, categorical, fraction, seed, stratify)


def encode_table(
    table: Table, name: str, task: str | None, categorical: Sequence[str], fraction: float, seed: int, stratify: bool
) -> Dataset:
    """See `load_table`."""
    if len(table) < 2:
        raise DataError(f"{table.path}: has 1 row, which cannot be split into a training and a test part: add rows")
    columns = [column for column in table.names if column != name]
    check_columns(table, columns, categorical)
    goal = TableTarget.fit(table, name, task)
    y = goal.values(table)
    rest, test = held_out_rows(len(table), fraction, seed, y if goal.classes and stratify else None)
    training, testing = table.take(rest), table.take(test)
    if goal.scaling is not None:  # its mean and deviation are those of the training rows
        goal = TableTarget.fit(training, name, "regression")
    encoder = TableEncoder.fit(training, columns, categorical, date_columns(table, columns, categorical))
    what = f"{len(goal.classes):,} classes" if goal.classes else "values"
    heading = "" if table.header else ", no header line"
    kinds = [
        f"{len(found)} of {kind}" for kind, found in (("text", encoder.categories), ("dates", encoder.dates)) if found
    ]
    text = f" ({', '.join(kinds)})" if kinds else ""
    source = (
        f"{table.path}, {len(table):,} rows of {len(columns):,} columns{text}, {what} in column {name!r}{heading}, "
        f"split {len(rest):,}/{len(test):,}"
    )
    return Dataset(
        Path(table.path).name, source, encoder.transform(training), goal.encode(y[rest]),
        encoder.transform(testing), goal.encode(y[test]), goal.classes,
        encoding=TableEncoding(encoder, goal, table.header), test_values=y[test], test_table=testing,
    )  # fmt: skip


def as_table(data: Any, text_columns: Sequence[str], header: bool | None = None) -> Table:
    """A Table from the path of a file, a pandas or polars DataFrame, a dict of columns, or a Table.

    text_columns: the columns to read as text, where the data has them. header: whether a file has a header line; None finds
    it out. Raises ArgumentTypeError for anything else.
    """
    if isinstance(data, Table):
        return data
    if isinstance(data, str | Path):
        path = Path(data).expanduser()
        if not path.is_file():
            raise DataError(f"{path}: {'is not a file' if path.exists() else 'no such file'}: check the path")
        return TableFile(path, header=header).read(as_text=text_columns)
    if not isinstance(data, Mapping) and not hasattr(data, "columns"):
        kind = type(data).__name__
        raise ArgumentTypeError(f"x is of type {kind}: pass the path of a file, a DataFrame, or a dict of columns")
    keys = list(data if isinstance(data, Mapping) else data.columns)
    names = [str(key) for key in keys]
    if isinstance(data, Mapping) and data and all(np.ndim(value) == 0 for value in data.values()):
        data = {key: [value] for key, value in data.items()}  # one row
    columns = [_column(data[key], as_text=str(key) in text_columns) for key in keys]
    lengths = {len(column) for column in columns}
    if len(lengths) != 1:
        raise DataError(f"x has columns of {sorted(lengths)} rows: pass columns of the same length")
    return Table("x", tuple(names), tuple(columns), np.arange(lengths.pop()))


def _column(values: Any, as_text: bool) -> np.ndarray:
    """float64 with NaN, or an object array of str with "" for a missing value: of a text column, or if a value is text.

    Booleans are the texts True and False, as in a file.
    """
    array = np.asarray(values)
    if array.dtype.kind == "m":
        array = array / np.timedelta64(1, "D")
    if as_text and array.dtype in (np.float16, np.float32):
        array = array.astype(str).astype(np.float64)  # 0.1, as in a file
    if array.dtype.kind == "f" or (array.dtype.kind in "ui" and not as_text):  # a float64 may lack digits of an integer
        return array.astype(np.float64)
    if array.dtype.kind == "M":
        array = _date_texts(array)
    texts = ["" if _is_missing(value) else str(value).strip() for value in array.tolist()]
    return column_of(["" if text.lower() in MISSING else text for text in texts], as_text)


def _date_texts(dates: np.ndarray) -> np.ndarray:
    """The dates as a file has them: `2024-05-31`, or `2024-05-31 12:00:00` if one has a time; NaT is missing."""
    if np.datetime_data(dates.dtype)[0] in ("ps", "fs", "as"):
        dates = dates.astype("M8[ns]")
    present = dates[~np.isnat(dates)]
    unit = next((unit for unit in ("D", "s", "us") if (present == present.astype(f"M8[{unit}]")).all()), "ns")
    texts = dates.astype(f"M8[{unit}]").astype(str).tolist()
    return np.array(["" if text == "NaT" else text.replace("T", " ") for text in texts], object)


def _is_missing(value: Any) -> bool:
    """Whether it is None, NaN or pandas' NA, whose comparison with itself has no truth value."""
    try:
        return value is None or bool(value != value)
    except (TypeError, ValueError):
        return True
