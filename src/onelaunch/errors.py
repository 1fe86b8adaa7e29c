"""The errors that a user can fix. Each message is one line: the argument, the value it got, what to pass instead.

All are `ValueError`s, so that `except ValueError` catches them. The command line turns them into exit code 2 and never
prints a traceback for them.
"""

from __future__ import annotations

import difflib
import errno
import numbers
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

MAX_NAMED = 5  # entries of a long list that a message names
MAX_LINE = 120  # characters of a message from elsewhere
MAX_LONG_LINE = 400  # characters of one that may be our own, which ends with the remedy
SYNONYMS = {"swish": "silu", "logistic": "sigmoid"}  # other libraries' names of options


class OnelaunchError(ValueError):
    """An invalid argument, with the remedy in the message."""


class ArgumentTypeError(OnelaunchError, TypeError):
    """A value of the wrong type."""


class DataError(OnelaunchError):
    """A data file that is missing, damaged or not of the format it claims."""


class CheckpointError(OnelaunchError):
    """A checkpoint that is missing, damaged, or of another run."""


class UnsupportedError(OnelaunchError):
    """An engine or precision that cannot run this model on this machine."""


class DivergedError(OnelaunchError):
    """The loss or the weights are no longer finite."""

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step


def reason_of(error: Exception) -> str:
    """The operating system's message, without its number and path; for other errors, their text."""
    return str(getattr(error, "strerror", None) or error)


def unwritable_reason(error: Exception, remedy: str = "pass a writable path") -> str:
    """Why a file cannot be written, and what to do: `remedy`, or to free some space if the disk or a quota is full."""
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", None))
    return f"cannot be written: {reason_of(error)}; {'free some space, or pass another path' if full else remedy}"


def first_line(message: object, limit: int = MAX_LINE) -> str:
    """The first line with words of an error or a message, cut after `limit` characters; of an error without any, its type."""
    line = next((line.strip() for line in str(message).splitlines() if line.strip()), "")
    if not line and isinstance(message, BaseException):
        return type(message).__name__
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def type_and_message(error: BaseException) -> str:
    """An error of the user's own code on one line: its type, and what it says."""
    kind, words = type(error).__name__, first_line(error)
    return kind if words == kind else f"{kind}: {words}"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` means that memory ran out, which PyTorch, NumPy, CUDA and the system each report differently."""
    if isinstance(error, RuntimeError):
        return "alloca" in str(error) or "out of memory" in str(error)
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)


def suggest(value: object, options: Iterable[str]) -> str:
    """`"; did you mean 'adam'?"` when an option is close to `value`, else an empty string."""
    by_lower = {option.lower(): option for option in options}
    name = str(value).lower()
    close = [SYNONYMS[name]] if SYNONYMS.get(name) in by_lower else difflib.get_close_matches(name, by_lower, n=1)
    return f"; did you mean {by_lower[close[0]]!r}?" if close else ""


suggest._dynamo_marked_constant = True  # type: ignore[attr-defined]  # difflib cannot be traced: torch.compile would report it


def abbreviate_list(names: Sequence[str]) -> str:
    """The first names of a long list, as in `a, b, c, d, e and 63 more`."""
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more


def abbreviate(value: object, limit: int = 60) -> str:
    """The repr of `value` for a message: on one line, cut after `limit` characters."""
    return " ".join(repr(value).split())[:limit]


def require_integer(argument: str, value: object, expected: str) -> int:
    """`value` as an int; NumPy's integers are accepted. Raises ArgumentTypeError otherwise, with `expected` as the remedy."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ArgumentTypeError(f"{argument}={abbreviate(value)} is not an integer: pass {expected}")
    return int(value)


def require_path(argument: str, value: object) -> Path:
    """`value` as a Path; raises ArgumentTypeError if it is not the name of a file or folder."""
    if not isinstance(value, str | os.PathLike):
        raise ArgumentTypeError(f"{argument}={abbreviate(value)} is not a path: pass the name of a file or folder")
    return Path(value)


def require_option(argument: str, value: object, options: Iterable[str], *, or_else: str = "") -> None:
    """Raise OnelaunchError unless `value` is one of `options`; `or_else` describes what else the caller accepts."""
    options = list(options)
    if not isinstance(value, str) or value not in options:
        known = "pass one of " + ", ".join(map(repr, options)) + (f", or {or_else}" if or_else else "")
        if isinstance(value, str):
            raise OnelaunchError(f"{argument}={abbreviate(value, 80)} is not known: {known}{suggest(value, options)}")
        kind = f"is of type {type(value).__name__}, not a name"
        raise OnelaunchError(f"{argument}={abbreviate(value)} {kind}: {known}")
