"""The engines and the choice among them: the fastest that can run this model here, and why."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType

import torch

from onelaunch.engines.contract import Engine, Run
from onelaunch.errors import UnsupportedError
from onelaunch.run.distributed import world

FASTEST_FIRST = ("resident", "graph", "cpu", "eager")


def engine_or_reason(name: str, device: torch.device) -> Engine | str:
    """The engine called `name`, or why it cannot run on this machine and device."""
    engine = _load(name)
    return engine.unavailable_reason(device) or engine


def _load(name: str) -> Engine:
    engine: Engine = importlib.import_module(f"onelaunch.engines.{name}").ENGINE
    return engine


def choose(run: Run, failed: Mapping[str, str] = MappingProxyType({})) -> tuple[Engine, str]:
    """The engine for `run`, with the reason in one line; UnsupportedError where none can do what was asked.

    `failed`: engines that found out only when they started why they cannot.
    """
    wanted = run.spec.engine
    names = list(FASTEST_FIRST) if wanted == "auto" else [wanted]
    passed_over: list[str] = []
    together = world().size > 1
    if together and wanted == "auto":
        names, passed_over = ["eager"], ["several processes train together"]
    for name in names:
        found = engine_or_reason(name, run.device)
        if together and name != "eager":
            found = "several processes train together, which the eager engine does"
        reason = failed.get(name) or (found if isinstance(found, str) else found.unsupported_reason(run))
        if not reason and not isinstance(found, str):
            return found, _reason(name, wanted, passed_over)
        passed_over.append(f"{name}: {reason}")
    if wanted != "auto":
        raise UnsupportedError(
            f"engine={wanted!r} cannot run this: {passed_over[0].split(': ', 1)[1]}; pass engine='auto'"
        )
    # The eager engine runs every model, so what it refuses is the precision or the memory asked for.
    raise UnsupportedError(passed_over[-1].split(": ", 1)[1])


def _reason(name: str, wanted: str, passed_over: list[str]) -> str:
    if wanted != "auto":
        return f"{name}, as asked"
    others = f" ({'; '.join(passed_over)})" if passed_over else ""
    return f"{name}, the fastest that can run this here{others}"
