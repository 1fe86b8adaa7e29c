"""The verdict on a chain whose sizes are not known, and a switch that overrules every verdict."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from onelaunch.fuse.chains import Chain

_forced: list[bool] = []


@contextlib.contextmanager
def force(choice: bool) -> Iterator[None]:
    """Every chain that can be fused is (or none is), whatever was measured or predicted."""
    _forced.append(choice)
    try:
        yield
    finally:
        _forced.pop()


def forced() -> bool | None:
    return _forced[-1] if _forced else None


def without_sizes(chain: Chain) -> str | None:
    """Why a chain is not fused; None for one that saves bytes and launches both, which pays at any size."""
    if forced() is not None:
        return None if forced() else "fusing is switched off"
    first = chain.operations[0]
    if first.role == "batch_norm" and first.option("training", False) is not True:
        return "a batch norm in evaluation mode pays for large inputs only: pass example inputs to fuse"
    return None
