"""Files that are either complete or absent: written under a temporary name, synced, then renamed into place."""

from __future__ import annotations

import contextlib
import errno
import functools
import glob
import hashlib
import os
import stat
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from onelaunch.operating_system import LOCKS, lock, user_cache

MAX_WHOLE_DIGEST = 2**30  # bytes of a file of which the digest reads everything
DIGEST_BLOCKS, DIGEST_BLOCK_BYTES = 256, 2**20  # what it reads of a larger one


def cache_folder(name: str) -> Path:
    """The folder `name` of onelaunch in the user's cache folder."""
    return user_cache(_home()) / "onelaunch" / name


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:  # no HOME and a user unknown to the system, as in some containers
        return Path(_process_folder().name)


@functools.cache
def _process_folder() -> tempfile.TemporaryDirectory[str]:
    """A private folder with an unguessable name, deleted when this process ends."""
    return tempfile.TemporaryDirectory(prefix="onelaunch-")


def digest_of_file(path: Path) -> str:
    """The BLAKE2b digest of the file's bytes, in hexadecimal, at about 2 s per GB.

    Of a file above 1 GiB, it is that of its size and of 256 evenly spaced MiB, with the first and the last one.
    """
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size <= MAX_WHOLE_DIGEST:
            return hashlib.file_digest(file, lambda: digest).hexdigest()
        digest.update(str(size).encode())
        for number in range(DIGEST_BLOCKS):
            file.seek((size - DIGEST_BLOCK_BYTES) * number // (DIGEST_BLOCKS - 1))
            digest.update(file.read(DIGEST_BLOCK_BYTES))
    return digest.hexdigest()


def read_text(path: Path) -> str:
    """The file's text. A FIFO yields what its writer sends, or "" if it has no writer (never blocks).

    Character devices raise OSError: they may be endless.
    """

    def open_without_waiting(name: str, flags: int) -> int:
        descriptor = os.open(name, flags | getattr(os, "O_NONBLOCK", 0))
        if hasattr(os, "O_NONBLOCK"):
            os.set_blocking(descriptor, True)
        return descriptor

    with open(path, encoding="utf-8-sig", opener=open_without_waiting) as file:
        if stat.S_ISCHR(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is a device")
        return file.read()


def temporary_name(path: Path) -> str:
    return f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp"


def write_atomic(path: Path, content: bytes | str) -> None:
    """Write `content` to `path`. A reader, or a kill -9 at any moment, leaves the old file or the new one, never a part."""
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
    """Lock `path` against other processes; BlockingIOError while another holds it. The system unlocks it when a process dies.

    The lock is a file beside `path`, and its holder deletes it at the end. A process that opened it before and locked it after
    the deletion holds a lock on a file that nobody else sees, and must try again.
    """
    if not LOCKS:
        yield
        return
    beside = path.with_name(f".{path.name}.lock")
    while True:
        handle = os.open(beside, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            lock(handle)
            if os.path.samestat(os.fstat(handle), os.stat(beside)):
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
            beside.unlink()
        os.close(handle)


def sync_folder(folder: Path) -> None:
    """Make a rename inside `folder` durable, on systems that can (Windows cannot open a folder)."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def remove_leftovers(folder: Path, name: str = "") -> None:
    """Delete temporary files of killed writers of the file `name`, or of any file. Call only while nobody writes there."""
    for leftover in folder.glob(f".{glob.escape(name)}.*.tmp" if name else ".*.tmp"):
        with contextlib.suppress(OSError):
            leftover.unlink()
