"""Files that are either whole or not there: written under a temporary name, synced, then renamed into place."""

from __future__ import annotations

import contextlib
import errno
import functools
import glob
import os
import stat
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


def cache_folder(name: str) -> Path:
    """`name` inside the folder where this user's programs keep what they can make again."""
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or _home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = _home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or _home() / ".cache")
    return base / "onelaunch" / name


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:  # no HOME, and a user that the system does not know, as in some containers
        return Path(_while_we_run().name)


@functools.cache
def _while_we_run() -> tempfile.TemporaryDirectory[str]:
    """A folder that nobody else can guess, gone when this process is."""
    return tempfile.TemporaryDirectory(prefix="onelaunch-")


def read_text(path: Path) -> str:
    """A file's words. Of a pipe what its writer says; where it has none, nothing, and nobody is waited for. A device may have
    no end: OSError."""

    def at_once(name: str, flags: int) -> int:
        descriptor = os.open(name, flags | getattr(os, "O_NONBLOCK", 0))
        if hasattr(os, "O_NONBLOCK"):
            os.set_blocking(descriptor, True)
        return descriptor

    with open(path, encoding="utf-8-sig", opener=at_once) as file:
        if stat.S_ISCHR(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is a device")
        return file.read()


def temporary_name(path: Path) -> str:
    return f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp"


def write_atomic(path: Path, content: bytes | str) -> None:
    """A reader, or a kill -9 at any moment, sees the old file or the new one, never part of one."""
    temporary = path.with_name(temporary_name(path))
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


@contextlib.contextmanager
def exclusive_lock(path: Path) -> Iterator[None]:
    """`path` for one at a time: BlockingIOError while another holds it. The system lets go of it when a process dies.

    The lock is a file beside `path`. Whoever leaves removes it, so one that was opened before and locked after is no lock.
    """
    if fcntl is None:
        yield
        return
    lock = path.with_name(f".{path.name}.lock")
    while True:
        handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(handle), os.stat(lock)):
                break
        except FileNotFoundError:
            pass
        except BlockingIOError:
            os.close(handle)
            raise
        except OSError:  # a file system without locks
            break
        os.close(handle)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            lock.unlink()
        os.close(handle)


def sync_folder(folder: Path) -> None:
    """Make a rename inside `folder` durable, where the system can (Windows cannot open a folder)."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def remove_leftovers(folder: Path, name: str = "") -> None:
    """Delete the temporary files of writers (of the file `name`) that were killed. Call only while nobody else writes there."""
    for leftover in folder.glob(f".{glob.escape(name)}.*.tmp" if name else ".*.tmp"):
        with contextlib.suppress(OSError):
            leftover.unlink()
