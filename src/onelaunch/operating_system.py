"""Everything that differs between Linux, macOS and Windows. Each function has an answer on all of them.

Training on the CPU engine needs nothing else. What a system lacks is left out: on Windows no file is locked, only Linux says
how much memory is free and lends AMX's tile registers. (The benchmarks read a few more of Linux's counters, and do without.)
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import platform
import re
import sys
from pathlib import Path
from typing import IO, Any

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LOCKS = fcntl is not None
CONTAINERS = Path("/sys/fs/cgroup")
CONTAINER_MEMORY = (  # limit, use, and (file, name) of the page cache within the use: of cgroup version 2, then 1
    ("memory.max", "memory.current", ("memory.stat", "file")),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", ("memory/memory.stat", "cache")),
)


# Files.


def user_cache(home: Path) -> Path:
    """The folder in which programs of a user with this home keep what they can make again."""
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    if sys.platform == "darwin":
        return home / "Library" / "Caches"
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")


def lock(descriptor: int) -> None:
    """Lock an open file against other processes, until it is closed or this one ends; BlockingIOError if another holds it.

    Raises OSError on a file system without locks, and does nothing on Windows.
    """
    if LOCKS:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def path_of(file: IO[Any], path: Path) -> str | Path:
    """A path of this open file: on Linux that of its descriptor, which stays the same file if `path` is replaced."""
    by_descriptor = f"/proc/self/fd/{file.fileno()}"
    return by_descriptor if os.path.exists(by_descriptor) else path


# Processors.


def cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """The number of cores this process may run on: in a container often fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@functools.cache
def yield_address() -> int:
    """The address of the function that lets another thread have the processor."""
    if sys.platform == "win32":
        function = ctypes.WinDLL("kernel32").SwitchToThread
    else:
        function = ctypes.CDLL(None).sched_yield
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def may_use_tiles() -> bool:
    """Ask for AMX's tile registers, which Linux grants per process: their 8 KiB are saved at context switches."""
    if not sys.platform.startswith("linux"):
        return False
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return ctypes.CDLL(None, use_errno=True).syscall(arch_prctl, request_permission, tile_data) == 0


# Memory.


def prefer_huge_pages(mapping: mmap.mmap) -> None:
    with contextlib.suppress(AttributeError, OSError, ValueError):
        mapping.madvise(mmap.MADV_HUGEPAGE)


def free_memory() -> int | None:
    """The bytes of host memory that this process can still have, within the limit of its container; None if unknown."""
    found = _numbers_of(Path("/proc/meminfo"))
    if "MemAvailable" not in found:
        return None
    free = 1024 * (found["MemAvailable"] + found.get("SwapFree", 0))
    for limit, used, cache in CONTAINER_MEMORY:
        most, now = (_numbers_of(CONTAINERS / name).get("", -1) for name in (limit, used))
        if most >= 0 and now >= 0:  # "max" is no number: there is no limit
            pages = _numbers_of(CONTAINERS / cache[0]).get(cache[1], 0)  # of files, which give way
            free = min(free, max(0, most - now + pages))
    return free


def _numbers_of(path: Path) -> dict[str, int]:
    """The numbers of lines such as `MemFree: 12 kB`, by name; of a line with a number alone, by the empty name."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    found = (re.match(r"(?:([^\s:]+):?\s+)?([0-9]+)\b", line) for line in lines)
    return {entry[1] or "": int(entry[2]) for entry in found if entry}
