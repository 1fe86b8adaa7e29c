"""The object code of a plan, cached on disk. Its key covers the settings, the target, LLVM's version and this engine's
sources."""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path

from onelaunch.code_cache import CodeCache
from onelaunch.engines.cpu.plan.settings import Settings
from onelaunch.engines.cpu.plan.target import Target

OBJECTS = CodeCache("cpu", layout="onelaunch cpu object 1", suffix=".o")


@functools.cache
def _sources_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def key_of(settings: Settings, target: Target) -> str:
    """The key of a plan's object code. Layer names do not change the code and are left out."""
    description = re.sub(r"path='[^']*'", "", repr(settings))
    return hashlib.sha256("\n".join((description, repr(target), _sources_digest())).encode()).hexdigest()
