"""Tables of named columns from `.csv`, `.tsv` and `.txt` files, each also with `.gz`, and from `.parquet` files.

The separator is a comma, semicolon or tab: one that divides the first lines into equally many fields, and of several such the
one that they have most of, unless its commas are decimal commas. A column in which every field is a number or missing is
numeric, any other column is text. Empty fields and the words in MISSING are missing values.

Rows stream through the standard library's reader into one float64 buffer per column. Only a file with text columns is read a
second time, for the text. 60,000 × 785 numbers take about 10 s, and little more memory than the result.
"""

from __future__ import annotations

import array
import csv
import functools
import gzip
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

import numpy as np

from onelaunch.errors import DataError, reason_of

TARGET_NAMES = ("target", "label", "y", "class")
MISSING = frozenset({"", "na", "n/a", "nan", "null", "?"})  # compared in lower case
MISSING_NUMBERS = MISSING | {"none"}  # which may be a name in a text column
SEPARATORS = ",;\t"  # in the order of preference
HEAD_LINES = 20  # by which separator and header are recognised
QUOTED = re.compile(r'(^|[,;\t])[ ]*"[^"]*(?:""[^"]*)*("|\Z)', re.MULTILINE)  # a field in quotes, with what precedes it
DECIMAL_COMMA = re.compile(r"[+-]?[0-9][0-9.]*,[0-9]+")
MAX_FIELD = 2**31 - 1  # characters; the standard library's own limit is 131,072
CHUNK_CELLS = 1 << 18


@dataclass(frozen=True)
class Table:
    """Columns of equal length. A numeric column is float64 with NaN for a missing value; a text column is an object array of
    str with "" for a missing value."""

    path: str
    names: tuple[str, ...]
    columns: tuple[np.ndarray, ...]
    lines: np.ndarray  # for messages: the line of the file that each row was read from, or the row's number from 0
    header: bool = True
    unit: str = "row"  # what `lines` counts; "line" for a text file

    def __len__(self) -> int:
        return len(self.lines)

    @functools.cached_property
    def index(self) -> dict[str, int]:
        """The position of each column by its name."""
        return {name: position for position, name in enumerate(self.names)}

    def column(self, name: str) -> np.ndarray:
        return self.columns[self.index[name]]

    def take(self, rows: np.ndarray) -> Table:
        """The table of these rows."""
        return replace(self, columns=tuple(column[rows] for column in self.columns), lines=self.lines[rows])

    def place(self, row: int, name: str) -> str:
        """`houses.csv: line 7, column 'rooms'`, for a message; `x: row 5, column 'rooms'` for a DataFrame."""
        return f"{self.path}: {self.unit} {self.lines[row]}, column {name!r}"


class TableFile:
    """A file whose header has been read: `names`, and `read()` for the rows."""

    def __init__(self, path: Path, target: str | None = None, header: bool | None = None) -> None:
        """`target` helps to tell a header from a first row: a field of that name makes it a header. `header` decides it."""
        self.path = path
        self._parquet = path.suffix.lower() == ".parquet"
        if self._parquet:
            self.header, self.names = True, _parquet_names(path)
            return
        with self._records() as records:
            head = [[field.strip() for field in record] for _, record in itertools.islice(records, HEAD_LINES)]
        if not head:
            raise DataError(f"{path}: is empty: pass a file with a header line and rows of numbers")
        first = head[0]
        self.header = _is_header(first, head[1:], target) if header is None else header
        self.names = tuple(first) if self.header else tuple(str(column) for column in range(len(first)))

    def read(self, as_text: Iterable[str] = ()) -> Table:
        """All rows. Columns named in `as_text` are text even if all their fields are numbers.

        Raises DataError for a line with too many or too few fields, and for a file without rows.
        """
        text_columns = {index for index, name in enumerate(self.names) if name in set(as_text)}
        if self._parquet:
            table = _read_parquet(self.path, self.names, text_columns)
        else:
            table = self._read_text(text_columns)
        if not len(table):
            raise DataError(f"{self.path}: has a header line and no rows: add some")
        return table

    def _read_text(self, text_columns: set[int]) -> Table:
        width = len(self.names)
        numbers = [array.array("d") for _ in range(width)]
        lines = array.array("q")
        words = set(text_columns)
        for chunk_lines, fields_of in self._chunks():
            lines.extend(chunk_lines)
            for index, fields in enumerate(fields_of):
                if index not in words and not _add_numbers(numbers[index], fields):
                    words.add(index)
        columns: list[np.ndarray] = [np.frombuffer(values, np.float64) if values else np.empty(0) for values in numbers]
        if words:
            texts: dict[int, list[str]] = {index: [] for index in words}
            for _, fields_of in self._chunks():
                for index in words:
                    texts[index] += map(_text, fields_of[index])
            for index, values in texts.items():
                columns[index] = text_column(values)
        return Table(str(self.path), self.names, tuple(columns), np.frombuffer(lines, np.int64), self.header, "line")

    def _chunks(self) -> Iterator[tuple[list[int], list[tuple[str, ...]]]]:
        """(line numbers, columns of fields) of some rows at a time."""
        width = len(self.names)
        with self._records() as records:
            rows = itertools.islice(records, 1 if self.header else 0, None)
            while chunk := list(itertools.islice(rows, max(1, CHUNK_CELLS // width))):
                for line, record in chunk:
                    if len(record) != width:
                        raise DataError(
                            f"{self.path}: line {line} has {len(record)} fields, the first line {width}: make them the same"
                        )
                yield [line for line, _ in chunk], list(zip(*(record for _, record in chunk), strict=True))

    @contextmanager
    def _records(self) -> Iterator[Iterator[tuple[int, list[str]]]]:
        """The line number and the fields of each line that is not blank."""
        path = self.path
        limit = csv.field_size_limit(MAX_FIELD)
        try:
            with _open(path) as file:
                yield _split_lines(file)
        except UnicodeDecodeError:
            raise DataError(f"{path}: is not UTF-8 text: save it as a UTF-8 csv file") from None
        except csv.Error as error:
            raise DataError(f"{path}: is not a csv file ({error}): check its quotes, or save it again") from None
        except (OSError, EOFError) as error:  # gzip raises both
            raise DataError(
                f"{path}: cannot be read ({reason_of(error)}): check the file and its permissions"
            ) from None
        finally:
            csv.field_size_limit(limit)


def _open(path: Path) -> TextIO:
    if path.suffix.lower() == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _split_lines(file: TextIO) -> Iterator[tuple[int, list[str]]]:
    head = "".join(itertools.islice((line for line in file if line.strip()), HEAD_LINES))
    file.seek(0)
    reader = csv.reader(file, delimiter=separator_of(head), strict=True)
    for record in reader:
        if len(record) > 1 or (record and record[0].strip()):
            yield reader.line_num, record


def separator_of(head: str) -> str:
    """The separator of a file that begins with these lines. Fields in quotes do not count."""
    cut = QUOTED.sub(lambda match: match[1] + ("" if match[2] else "\0"), head)  # \0: the quotes end beyond the head
    lines = [line for line in cut.splitlines() if line.strip() and "\0" not in line] or [cut]
    counts = {separator: [line.count(separator) for line in lines] for separator in SEPARATORS}
    even = [separator for separator, found in counts.items() if min(found) == max(found) > 0]
    possible = even or [separator for separator, found in counts.items() if found[0]] or [","]
    chosen = max(possible, key=lambda separator: counts[separator][0])
    if chosen == ",":  # a decimal comma also divides all lines alike
        return next((other for other in possible if other != "," and _has_decimal_commas(lines, other)), ",")
    return chosen


def _has_decimal_commas(lines: list[str], separator: str) -> bool:
    """Whether the separator gives a column of numbers with decimal commas. The first line may be a header."""
    records = [map(_text, line.split(separator)) for line in lines[1:] or lines]
    return any(decimal_comma(column) for column in zip(*records, strict=False))


def _add_numbers(numbers: array.array[float], fields: tuple[str, ...]) -> bool:
    """Append the fields as numbers, NaN for a missing one; False, and an incomplete array, if one is a word."""
    try:
        if _is_plain("".join(fields)):
            parsed = list(map(float, fields))
            numbers.extend(parsed)
            return True
    except ValueError:
        pass
    for text in fields:
        if text.strip().lower() in MISSING_NUMBERS:
            numbers.append(math.nan)
        elif is_number(text):
            numbers.append(float(text))
        else:
            return False
    return True


def _text(field: str) -> str:
    """The field without surrounding blanks, or "" if it is missing."""
    stripped = field.strip()
    return "" if stripped.lower() in MISSING else stripped


def _is_header(first: list[str], others: list[list[str]], target: str | None) -> bool:
    """Whether the first line holds names. A name may be a number: pandas calls nameless columns 0, 1, 2, …

    A class may be called y, as target columns are, but then it is also in one of the other lines."""
    numbers = {index for index, field in enumerate(first) if _is_numeric(field)}
    if not numbers or (len(numbers) > 2 and all(first[index] == str(index) for index in numbers)):
        return True
    for index, field in enumerate(first):
        if index in numbers or (field and not _text(field)):  # a number, or a word for a missing value
            continue
        below = [line[index] for line in others if index < len(line)]
        if field == target or (field.lower() in TARGET_NAMES and field not in below):
            return True
        if below and _is_numeric(below[0]):
            return True
    return False


def _is_numeric(field: str) -> bool:
    return is_number(field) or DECIMAL_COMMA.fullmatch(field) is not None


def _is_plain(text: str) -> bool:
    """Whether `float` reads the text as people do: Python's also takes 1_000 and the digits of other scripts."""
    return "_" not in text and text.isascii()


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return _is_plain(text.strip())


def text_column(texts: Iterable[str]) -> np.ndarray:
    """An object array of these strings, whose lengths NumPy must not look at: hence the None."""
    return np.array([*texts, None], object)[:-1]


def column_of(texts: Sequence[str], as_text: bool) -> np.ndarray:
    """float64 with NaN if all texts that are not empty are numbers and need not be text; else a text column."""
    if not as_text and all(not text or is_number(text) for text in texts):
        return np.array([float(text) if text else math.nan for text in texts])
    return text_column(texts)


def decimal_comma(texts: Iterable[str]) -> str:
    """The first number with a decimal comma, such as "3,14", if every text that is not missing is one or is a number."""
    found = ""
    for text in texts:
        if not text or is_number(text):
            continue
        if not DECIMAL_COMMA.fullmatch(text):
            return ""
        found = found or text
    return found


def with_point(text: str) -> str:
    """`3.14` for `3,14`, and `1234.5` for `1.234,5`."""
    return text.replace(".", "").replace(",", ".")


def _parquet_names(path: Path) -> tuple[str, ...]:
    return tuple(_parquet(path).schema_arrow.names)


def _parquet(path: Path):  # type: ignore[no-untyped-def]  # pyarrow has no types
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise DataError(f"{path}: a parquet file needs pyarrow: pip install pyarrow, or save it as .csv") from None
    try:
        return ParquetFile(path)
    except Exception as error:  # pyarrow raises its own errors, OSError and others
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"{path}: is not a parquet file ({reason}): save it again") from None


def _read_parquet(path: Path, names: tuple[str, ...], text_columns: set[int]) -> Table:
    from pyarrow import types

    content = _parquet(path).read()
    columns: list[np.ndarray] = []
    for index, column in enumerate(content.columns):
        kind = column.type
        is_numeric = any(test(kind) for test in (types.is_integer, types.is_floating, types.is_decimal))
        try:
            values = column.to_pylist()
        except (OverflowError, ValueError) as error:  # dates that Python does not have
            raise DataError(f"{path}: column {names[index]!r} cannot be read ({error}): correct it") from None
        if is_numeric and index not in text_columns:
            columns.append(np.array([math.nan if value is None else value for value in values], np.float64))
            continue
        texts = ["" if value is None else _text(str(value)) for value in values]
        columns.append(column_of(texts, index in text_columns))
    return Table(str(path), names, tuple(columns), np.arange(content.num_rows))
