"""Files that are either whole or not there: written under a temporary name, synced, then renamed into place."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from pathlib import Path


def cache_folder(name: str) -> Path:
    """`name` inside the folder where this user's programs keep what they can make again."""
    home = Path.home()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = home / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    return base / "onelaunch" / name


def write_atomic(path: Path, content: bytes | str) -> None:
    """A reader, or a kill -9 at any moment, sees the old file or the new one, never part of one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make a rename inside `folder` durable, where the system can (Windows cannot open a folder)."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def remove_leftovers(folder: Path) -> None:
    """Delete the temporary files of writers that were killed. Call only while no other process writes there."""
    for leftover in folder.glob(".*.tmp"):
        with contextlib.suppress(OSError):
            leftover.unlink()
