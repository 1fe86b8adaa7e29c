"""The object code of units, cached on disk. A key covers the unit's options, the target, LLVM's version and the sources of the
code generator."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

from onelaunch.code_cache import CodeCache
from onelaunch.engines.cpu.code.kernel import Unit
from onelaunch.engines.cpu.plan.target import Target

OBJECTS = CodeCache("cpu", layout="onelaunch cpu object 2", suffix=".o")


@functools.cache
def _sources_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@functools.cache
def _target_digest(target: Target) -> str:
    return hashlib.sha256(f"{target!r}\n{_sources_digest()}".encode()).hexdigest()


def key_of(unit: Unit, target: Target) -> str:
    """The key of a unit's object code."""
    return hashlib.sha256(f"{unit!r}\n{_target_digest(target)}".encode()).hexdigest()
