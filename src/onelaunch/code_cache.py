"""Machine code on disk: made once, checked on every load. The CPU engine keeps object files here, NVRTC cubins.

An entry is a header of three lines (layout, key, SHA-256 of the rest) and the code. The key covers all that shapes the code,
so that a new version never meets an old one's. Entries are written beside their place and moved there: a reader sees a whole
one or none. One that is damaged, of another key or unreadable counts as missing and is made anew.
"""

from __future__ import annotations

import contextlib
import hashlib
from dataclasses import dataclass
from pathlib import Path

from onelaunch.files import cache_folder, write_atomic


@dataclass(frozen=True)
class CodeCache:
    name: str  # of the folder within the user's cache folder
    layout: str  # the first line of every entry; another number for another content
    suffix: str

    def folder(self) -> Path:
        return cache_folder(self.name)

    def load(self, place: Path, key: str) -> bytes | None:
        """The code stored in `place` under `key`, or None when there is none that can be trusted."""
        try:
            content = (place / f"{key}{self.suffix}").read_bytes()
        except OSError:
            return None
        header = self._header(key, content.split(b"\n", 3)[-1])
        return content[len(header) :] if content.startswith(header) else None

    def store(self, place: Path, key: str, code: bytes) -> None:
        """Keep `code` for the next time; a folder that cannot be written is no reason to stop."""
        with contextlib.suppress(OSError):
            place.mkdir(parents=True, exist_ok=True)
            write_atomic(place / f"{key}{self.suffix}", self._header(key, code) + code)

    def _header(self, key: str, code: bytes) -> bytes:
        return f"{self.layout}\n{key}\n{hashlib.sha256(code).hexdigest()}\n".encode()
