"""Which texts of a table are the same value: a column has `1` in one file, `1.0` in another, and `True` in a DataFrame.

pandas reads a column of `true` and `false` as booleans, one of `01` as whole numbers and one with gaps as decimal numbers, so
the same rows come in several spellings.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

from onelaunch.data.table_file import MISSING_NUMBERS, is_number

WHOLE_NUMBER = re.compile(r"[+-]?[0-9]{1,18}(\.0*)?")
ISO_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}([T ].+)?")
ISO_TIME = re.compile(r"([0-9]{4}-[0-9]{2}-[0-9]{2})[T ]([0-9]{2}:[0-9]{2})(?::([0-9]{2})(?:\.([0-9]+))?)?")
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MAX_ROUNDED = 1e15  # of a larger number, 15 digits may be those of another one
BOOLEANS = {"true": "True", "false": "False"}  # by the text in lower case
OTHER_SPELLING = {"True": "1", "False": "0", "1": "True", "0": "False"}


def plain(text: str) -> str:
    """`3` for `3.00` and `+3`, `True` for `TRUE` and `true`, `2024-05-31` for `2024-05-31T00:00:00`; anything else, such as
    `03`, unchanged."""
    if WHOLE_NUMBER.fullmatch(text):
        whole = text.partition(".")[0]
        digits = whole.lstrip("+-")
        return text if digits[0] == "0" and len(digits) > 1 else str(int(whole))
    if found := ISO_TIME.fullmatch(text):
        date, minutes, seconds, fraction = found.groups(default="")
        time = f"{minutes}:{seconds or '00'}.{fraction.rstrip('0')}".rstrip(".")
        return date if time == "00:00:00" else f"{date} {time}"
    return BOOLEANS.get(text.lower(), text)


def has_spellings(text: str) -> bool:
    """Whether it is a number, a boolean, a date or missing, so that another program may write it differently."""
    return not text or is_number(text) or text.lower() in BOOLEANS or ISO_DATE.fullmatch(text) is not None


def number_of(text: str) -> float | None:
    """The text as a number: 1 and 0 for True and False, NaN for a missing one; None if it is a word."""
    if text.lower() in MISSING_NUMBERS:
        return math.nan
    text = BOOLEANS.get(text.lower(), text)
    text = OTHER_SPELLING[text] if text in BOOLEANS.values() else text
    return float(text) if is_number(text) else None


def days_of(text: str) -> float | None:
    """The days from 1970-01-01 to an ISO date, such as `2024-05-31` or `2024-05-31T12:00:00Z`; NaN if it is missing, None if
    it is something else. A time without a zone is in UTC."""
    if text.lower() in MISSING_NUMBERS:
        return math.nan
    if not ISO_DATE.fullmatch(text):
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return (moment - EPOCH) / timedelta(days=1)


def text_of(number: float) -> str:
    """The number as a file has it: `3` for 3.0, and 15 digits of a fraction or a very large number; nothing for NaN."""
    if math.isnan(number):
        return ""
    return str(int(number)) if number.is_integer() and abs(number) < 1e18 else f"{number:.15g}"


class Positions(dict[str, int]):
    """The position of each text among `known`; -1 if it is none of them.

    A text that `known` has in another spelling is found if it can mean one of them only: `1.0` and `01` are `1`, `TRUE` is
    `true`, and `1` and `0` are `True` and `False` where only those are known, or the reverse.
    """

    def __init__(self, known: Iterable[str]) -> None:
        super().__init__((text, position) for position, text in enumerate(known))
        self._fractions = all(map(has_spellings, self))  # among words, 1.1 and 1.10 may be names
        self._alike: dict[str, int] = {}
        for text, position in self.items():
            key = self._key(text)
            self._alike[key] = -1 if key in self._alike else position
        keys = self._alike.keys() - {""}
        self._binary = keys <= {"True", "False"} or keys <= {"0", "1"}

    def __missing__(self, text: str) -> int:
        key = self._key(text)
        found = self.get(plain(text), self._alike.get(key))
        if found is None:
            found = self._alike.get(OTHER_SPELLING[key], -1) if self._binary and key in OTHER_SPELLING else -1
        self[text] = found
        return found

    def _key(self, text: str) -> str:
        """The same text for all spellings of a value."""
        if WHOLE_NUMBER.fullmatch(text):
            return str(int(text.partition(".")[0]))
        if self._fractions and text and is_number(text) and abs(float(text)) < MAX_ROUNDED:
            return text_of(float(text))
        return plain(text)
