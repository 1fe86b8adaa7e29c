"""Measured times in a JSON file under the user's cache folder, so that a later process need not measure again.

A file belongs to one chip, one version of torch and Triton, and one state of the timed sources: a change of any of these
starts a new file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from pathlib import Path
from typing import Any

import torch

from onelaunch.files import cache_folder, write_atomic

PACKAGE = Path(__file__).parent
SOURCE_SUFFIXES = (".py", ".cuh", ".cu")


def sources_digest(*names: str) -> str:
    """12 hexadecimal digits that change with the sources of these files and folders of the package."""
    digest = hashlib.sha256()
    for name in names:
        place = PACKAGE / name
        for path in sorted(place.rglob("*")) if place.is_dir() else [place]:
            if path.suffix in SOURCE_SUFFIXES:
                content = path.read_bytes()
                digest.update(f"{path.relative_to(PACKAGE).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:12]


class MeasuredTimes:
    """Entries of a file, each a text key and the seconds of some named alternatives, in memory and on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries = self._read()

    @classmethod
    def of_device(cls, device: int, folder: str, *sources: str) -> MeasuredTimes:
        """The times in cache folder `folder` for a CUDA device and for these sources of the package."""
        import triton

        chip = torch.cuda.get_device_name(device).replace(" ", "-").replace("/", "-")
        name = f"{chip}-torch{torch.__version__}-triton{triton.__version__}-{sources_digest(*sources)}.json"
        return cls(cache_folder(folder) / name)

    def _read(self) -> dict[str, Any]:
        try:
            content = json.loads(self.path.read_text())
            return content if isinstance(content, dict) else {}
        except (OSError, ValueError, RecursionError):
            return {}  # no file yet, or a damaged one: measured again

    def times(self, key: str) -> dict[str, float]:
        """Seconds of each alternative, infinite for one that cannot run; empty for an unknown or damaged entry."""
        found = self.entries.get(key)
        if not isinstance(found, dict) or not all(isinstance(time, float) and time > 0 for time in found.values()):
            return {}
        return found if any(time < math.inf for time in found.values()) else {}

    def add(self, key: str, times: dict[str, float]) -> None:
        """Add an entry; keeps what other processes have written meanwhile."""
        self.entries = {**self._read(), **self.entries, key: times}
        with contextlib.suppress(OSError):  # a read-only home costs one measurement per process, nothing else
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self.path, json.dumps(self.entries, indent=1))
