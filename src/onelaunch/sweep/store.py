"""The checkpoint folder of a sweep: what the sweep is, and the records and weights of its finished members.

    sweep.json             the candidates, options and data, to recognise the sweep
    part-000001.safetensors   records of some members, in the order in which they finished

Every file is written atomically and never changed, so that kill -9 loses only members since the last part. A later part may
hold a longer record of a member that successive halving let continue.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from onelaunch.errors import ArgumentTypeError, CheckpointError, reason_of
from onelaunch.files import exclusive_lock, remove_leftovers, write_atomic
from onelaunch.sweep.member import Record

ABOUT = "sweep.json"
PARTS = "part-*.safetensors"
MIN_SECONDS = 2.0  # between two parts
SHARE_OF_TIME = 0.02  # the interval grows with the sweep, so that a long one has a few hundred parts
SCALARS = ("seconds", "best_epoch", "error", "finished", "total", "per_epoch")  # fields of a Record kept as JSON

State = dict[str, torch.Tensor]


class Store:
    """An open checkpoint folder. Without a folder it keeps nothing."""

    def __init__(self, folder: Path | None, about: dict[str, Any]) -> None:
        self.folder, self.about = folder, json.loads(json.dumps(about))
        self._pending: dict[int, tuple[Record, State]] = {}
        self._begin = self._written = time.perf_counter()
        self._places: dict[int, Path] = {}  # the part that holds a member's weights

    def load(self, shared: dict[tuple[str, ...], dict[str, Any]]) -> dict[int, Record]:
        """The records of an earlier start of the same sweep, by member. Raises CheckpointError if it is another sweep's."""
        if self.folder is None:
            return {}
        path = self.folder / ABOUT
        found: dict[int, Record] = {}
        try:
            if not path.exists():
                if any(self.folder.iterdir()):
                    raise _error(self.folder, f"is not empty and has no {ABOUT}: pass a new folder")
                write_atomic(path, json.dumps(self.about, indent=1) + "\n")
                return {}
            earlier = json.loads(path.read_text(encoding="utf-8"))
            differs = [name for name in self.about if earlier.get(name) != self.about[name]]
            if differs:
                raise _error(self.folder, f"holds another sweep (its {', '.join(differs)} differ): pass another folder")
            for part in sorted(self.folder.glob(PARTS)):
                for record in self._read(part, shared):
                    found[record.index] = record
        except CheckpointError:
            raise
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _error(self.folder, f"cannot be read ({reason_of(error)}): pass another folder") from error
        return found

    def _read(self, part: Path, shared: dict[tuple[str, ...], dict[str, Any]]) -> Iterator[Record]:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(part, framework="np") as file:
                about = json.loads(file.metadata()["about"])
                tables = [shared.setdefault(tuple(entry.values()), entry) for entry in about["shared"]]
                for index, entry in about["members"].items():
                    fields = {name: entry[name] for name in SCALARS}
                    yield Record(
                        index=int(index), losses=file.get_tensor(f"{index}.losses"), metrics=tuple(entry["metrics"]),
                        epochs=file.get_tensor(f"{index}.epochs"), shared=tables[entry["shared"]], **fields,
                    )  # fmt: skip
                    if entry["weights"]:
                        self._places[int(index)] = part
        except SafetensorError as error:
            raise _error(
                self.folder, f"has a damaged {part.name} ({error}): delete this file, and train its members again"
            ) from error

    def weights(self, index: int) -> State | None:
        """The weights of a finished member; None if the folder does not have them."""
        from safetensors import safe_open

        if index in self._pending:
            return self._pending[index][1] or None
        part = self._places.get(index)
        if part is None:
            return None
        prefix = f"{index}.weights."
        with safe_open(part, framework="pt") as file:
            return {name.removeprefix(prefix): file.get_tensor(name) for name in file.keys() if name.startswith(prefix)}  # noqa: SIM118

    def add(self, record: Record, weights: State) -> None:
        """Keep a record, and write all new ones now and then. `weights`: empty if they are not kept."""
        if self.folder is None:
            return
        self._pending[record.index] = record, weights
        now = time.perf_counter()
        if now - self._written > max(MIN_SECONDS, SHARE_OF_TIME * (now - self._begin)):
            self.flush()

    def flush(self) -> None:
        """Write the records that are not written yet."""
        if self.folder is None or not self._pending:
            return
        from safetensors.torch import save

        number = 1 + max((int(part.stem.split("-")[1]) for part in self.folder.glob(PARTS)), default=0)
        tables: list[dict[str, Any]] = []
        tensors: State = {}
        members = {}
        for index, (record, weights) in self._pending.items():
            if record.shared not in tables:
                tables.append(record.shared)
            tensors[f"{index}.losses"] = torch.from_numpy(np.ascontiguousarray(record.losses))
            tensors[f"{index}.epochs"] = torch.from_numpy(np.ascontiguousarray(record.epochs))
            tensors |= {f"{index}.weights.{name}": tensor for name, tensor in weights.items()}
            members[index] = {
                **{name: getattr(record, name) for name in SCALARS}, "metrics": list(record.metrics),
                "shared": tables.index(record.shared), "weights": bool(weights),
            }  # fmt: skip
        about = json.dumps({"members": members, "shared": tables})
        part = self.folder / f"part-{number:06}.safetensors"
        try:
            write_atomic(part, save(tensors, {"about": about}))
        except OSError as error:
            raise _error(self.folder, f"cannot be written: {reason_of(error)}; free some space") from error
        self._places |= {index: part for index, (_, weights) in self._pending.items() if weights}
        self._pending = {}
        self._written = time.perf_counter()


@contextlib.contextmanager
def open_store(checkpoint: Any, about: Mapping[str, Any]) -> Iterator[Store]:
    """The Store of the argument `checkpoint`, locked against other processes; what is pending is written at the end."""
    if checkpoint is None:
        yield Store(None, dict(about))
        return
    if not isinstance(checkpoint, str | Path):
        raise ArgumentTypeError(f"checkpoint={checkpoint!r:.60} is not a path")
    folder = Path(checkpoint)
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(exclusive_lock(folder))
            remove_leftovers(folder)
        except BlockingIOError as error:
            raise _error(folder, "is in use by another sweep: wait for its end, or pass another folder") from error
        except (OSError, ValueError) as error:
            raise _error(folder, f"cannot be written: {reason_of(error)}; pass a writable folder") from error
        store = Store(folder, dict(about))
        try:
            yield store
        finally:
            store.flush()


def _error(folder: Path | None, message: str) -> CheckpointError:
    return CheckpointError(f"checkpoint={str(folder)!r} {message}")
