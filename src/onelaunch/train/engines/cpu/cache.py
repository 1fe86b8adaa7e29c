"""Object code on disk: made once for a plan and a machine, checked on every load.

An entry is a header of a few lines (format, key, SHA-256 of the rest) and the object file. The key covers the plan's
settings, the target, LLVM's version and the sources of the emitters, so that a new version never meets old code. Entries
are written beside their place and moved there, so that a reader sees a whole one or none; one that is damaged, of another
key or unreadable counts as missing and is made anew.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import re
from pathlib import Path

from onelaunch.files import cache_folder, write_atomic
from onelaunch.train.engines.cpu.plan import Settings
from onelaunch.train.engines.cpu.target import Target

FORMAT = b"onelaunch cpu object 1"
SOURCES = (
    "backward", "elementwise", "emit", "few_classes", "forward", "gradient", "loss", "native", "norm", "optimizer", "phase",
    "plan", "program", "random_bits", "stages", "target", "threads", "tile", "vector_math",
)  # fmt: skip


def folder() -> Path:
    """The user's cache folder for object code."""
    return cache_folder("cpu")


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


def load(place: Path, key: str) -> bytes | None:
    """The object code stored under `key`, or None when there is none that can be trusted."""
    try:
        content = (place / f"{key}.o").read_bytes()
    except OSError:
        return None
    parts = content.split(b"\n", 3)
    if len(parts) != 4:
        return None
    header, stored_key, checksum, code = parts
    if header != FORMAT or stored_key != key.encode() or checksum != hashlib.sha256(code).hexdigest().encode():
        return None
    return code


def store(place: Path, key: str, code: bytes) -> None:
    """Keep `code` for the next time; a folder that cannot be written is no reason to stop."""
    content = b"\n".join((FORMAT, key.encode(), hashlib.sha256(code).hexdigest().encode(), code))
    with contextlib.suppress(OSError):
        place.mkdir(parents=True, exist_ok=True)
        write_atomic(place / f"{key}.o", content)
