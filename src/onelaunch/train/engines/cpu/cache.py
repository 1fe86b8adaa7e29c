"""The object code of a plan, kept on disk under a key.

The key covers the plan's settings, the target, LLVM's version and the sources of the emitters.
"""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path

from onelaunch.code_cache import CodeCache
from onelaunch.train.engines.cpu.settings import Settings
from onelaunch.train.engines.cpu.target import Target

OBJECTS = CodeCache("cpu", layout="onelaunch cpu object 1", suffix=".o")
SOURCES = (
    "backward", "elementwise", "emit", "few_classes", "forward", "gather", "gradient", "instructions", "loss", "native", "norm",
    "optimizer", "phase", "plan", "program", "random_bits", "settings", "stage_gradient", "stages", "target", "threads",
    "tile", "vector_math",
)  # fmt: skip


@functools.cache
def _sources_digest() -> str:
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update((Path(__file__).parent / f"{name}.py").read_bytes())
    return digest.hexdigest()


def key_of(settings: Settings, target: Target) -> str:
    """Names of layers do not change the code, so the network goes in without them."""
    description = re.sub(r"path='[^']*'", "", repr(settings))
    return hashlib.sha256("\n".join((description, repr(target), _sources_digest())).encode()).hexdigest()
