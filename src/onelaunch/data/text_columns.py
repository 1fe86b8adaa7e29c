"""What a text column holds: dates, categories, or nothing to learn from."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

import numpy as np

from onelaunch.data.table_file import decimal_comma, with_point
from onelaunch.data.table_values import ISO_DATE, days_of, has_spellings, plain

MAX_CATEGORIES = 255  # of one column; the rarer ones are encoded as zeros
MIN_IDENTIFIER_VALUES = 20  # a column with more different texts than this, and than half of its rows, is an identifier
DATE = re.compile(r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}([ T]|$)|\d{1,2}[-/.]\d{1,2}[-/.]\d{4}([ T]|$)")


def categories_of(column: np.ndarray) -> tuple[str, ...] | str:
    """The categories of a text column, sorted; or the reason to leave the column out."""
    counts = Counter(column.tolist())
    if all(map(has_spellings, counts)):
        counts = _merged(counts)
    values = len(counts) - ("" in counts)
    if values == 0:
        return "has no value"
    if len(counts) == 1:
        return "is constant"
    if values > max(MIN_IDENTIFIER_VALUES, (len(column) - counts[""]) / 2):
        if commas := decimal_comma(counts):
            return f"has numbers with decimal commas, such as {commas!r}, which are text: write {with_point(commas)}"
        if date := date_in(counts):
            return f"has dates, such as {date!r}, which are text: write dates as 2024-05-31"
        return f"has {values:,} different texts in {len(column):,} rows, as an identifier has"
    return tuple(sorted(sorted(counts, key=lambda text: (-counts[text], text))[:MAX_CATEGORIES]))


def _merged(counts: Counter[str]) -> Counter[str]:
    """The counts of the values, whose spellings are counted together."""
    found: Counter[str] = Counter()
    for text, count in counts.items():
        found[plain(text)] += count
    return found


def date_in(texts: Iterable[str]) -> str:
    """A date that is no ISO date, such as "31.5.2024", if all texts that are not missing are dates; else an empty string."""
    present = [text for text in texts if text]
    found = next((text for text in present if days_of(text) is None), "")
    return found if all(map(DATE.match, present)) else ""


def has_dates(column: np.ndarray) -> bool:
    """Whether it is a text column in which all values that are not missing are ISO dates, such as "2024-05-31"."""
    if column.dtype != object or any(days_of(text) is None for text in column):
        return False
    return any(map(ISO_DATE.fullmatch, column))
