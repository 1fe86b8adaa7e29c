"""That a forward cannot be taken as a graph, and why."""

from __future__ import annotations


class RefusedError(Exception):
    """Why a forward cannot be taken as a graph."""


def said_by(error: BaseException, *, sentence: bool = True) -> str:
    """The first line of an error, or sentence of it, with its kind where that alone says little."""
    first = next(iter(str(error).strip().splitlines()), "")
    if sentence:
        first = first.split(". ")[0].rstrip(".")
    return first if " " in first else f"{type(error).__name__} {first}".rstrip()
