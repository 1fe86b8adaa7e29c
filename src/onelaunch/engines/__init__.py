"""The choice of an engine: the fastest that can run this model on this machine, and the reason."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import MappingProxyType

import torch

from onelaunch.engines.contract import Engine, Run
from onelaunch.errors import UnsupportedError
from onelaunch.run.distributed import world

FASTEST_FIRST = ("resident", "graph", "compiled", "cpu", "eager")


def engine_or_reason(name: str, device: torch.device) -> Engine | str:
    """The engine called `name`, or why it cannot run on this machine and device."""
    engine = _load(name)
    return engine.unavailable_reason(device) or engine


def _load(name: str) -> Engine:
    engine: Engine = importlib.import_module(f"onelaunch.engines.{name}").ENGINE
    return engine


def choose(run: Run, failed: Mapping[str, str] = MappingProxyType({})) -> tuple[Engine, str]:
    """The engine for `run` and the reason for it in one line; UnsupportedError where no engine can run it.

    `failed` maps engines that refused the run only when they started to their reason.
    """
    requested = run.spec.engine
    names = list(FASTEST_FIRST) if requested == "auto" else [requested]
    passed_over: dict[str, list[str]] = {}  # the engines, by the reason
    reason = ""
    several_processes = world().size > 1
    if several_processes and requested == "auto":
        names, passed_over = ["eager"], {"several processes train together": []}
        _refuse_slower_processes(run)
    for name in names:
        found = engine_or_reason(name, run.device)
        if several_processes and name != "eager":
            found = "several processes train together, which the eager engine does"
        reason = failed.get(name) or (found if isinstance(found, str) else found.unsupported_reason(run))
        if not reason and not isinstance(found, str):
            return found, _choice_reason(name, requested, passed_over)
        passed_over.setdefault(reason, []).append(name)
    if requested != "auto":
        raise UnsupportedError(f"engine={requested!r} cannot run this: {reason}; pass engine='auto'")
    # The eager engine comes last and runs every model: it can only have refused the requested precision or memory.
    raise UnsupportedError(reason)


def _refuse_slower_processes(run: Run) -> None:
    """Refuse several processes on CPUs where one process would be faster: the CPU engine has threads, and no processes."""
    found = engine_or_reason("cpu", run.device)
    if isinstance(found, str) or found.unsupported_reason(run):
        return
    raise UnsupportedError(
        f"{world().size} processes on CPUs train with engine='eager', which takes several times as long as the threads of one "
        "process with engine='cpu': start one process, or pass engine='eager'"
    )


def _choice_reason(name: str, requested: str, passed_over: Mapping[str, list[str]]) -> str:
    if requested != "auto":
        return f"{name}, as requested"
    parts = [f"{', '.join(engines)}: {reason}" if engines else reason for reason, engines in passed_over.items()]
    others = f" ({'; '.join(parts)})" if parts else ""
    return f"{name}, the fastest that can run this here{others}"
