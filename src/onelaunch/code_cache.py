"""Machine code on disk: compiled once, verified on every load. Object files of the CPU engine and cubins of NVRTC.

An entry is a header of three lines (layout, key, SHA-256 of the rest) and the code. The key covers everything that shapes the
code, so that a new version never loads an old version's code. Entries are written atomically: a reader sees a complete one or
none. An entry that is damaged, has another key or is unreadable counts as missing, and is compiled again.
"""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import dataclass
from pathlib import Path

from onelaunch.files import cache_folder, write_atomic


@dataclass(frozen=True)
class CodeCache:
    """A folder of compiled code."""

    name: str  # of the folder in the user's cache folder
    layout: str  # first line of every entry; a new format needs a new layout
    suffix: str

    def folder(self) -> Path:
        return cache_folder(self.name)

    def load(self, folder: Path, key: str) -> bytes | None:
        """The code stored in `folder` under `key`, or None if there is none that can be trusted."""
        try:
            content = (folder / f"{key}{self.suffix}").read_bytes()
        except OSError:
            return None
        header = self._header(key, content.split(b"\n", 3)[-1])
        return content[len(header) :] if content.startswith(header) else None

    def store(self, folder: Path, key: str, code: bytes) -> None:
        """Store `code` for later loads. A folder that cannot be written is ignored."""
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            write_atomic(folder / f"{key}{self.suffix}", self._header(key, code) + code)

    def _header(self, key: str, code: bytes) -> bytes:
        return f"{self.layout}\n{key}\n{hashlib.sha256(code).hexdigest()}\n".encode()
