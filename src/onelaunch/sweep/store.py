"""The checkpoint folder of a sweep: what the sweep is, and the records and weights of its finished members.

    sweep.json             the candidates, options and data, to recognise the sweep
    part-000001.safetensors   records of some members, in the order in which they finished

Every file is written atomically and never changed, so that kill -9 loses only members since the last part. A later part may
hold a longer record of a member that successive halving let continue. sweep.json and every member have a checksum, which is
verified when they are read; files of older versions have none. A part that cannot be written does not end the sweep.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from onelaunch.errors import CheckpointError, reason_of, require_path, unwritable_reason
from onelaunch.files import exclusive_lock, remove_leftovers, write_atomic
from onelaunch.sweep.member import Record
from onelaunch.train.checkpoint import digest_of
from onelaunch.train.tensor_files import open_tensors

log = logging.getLogger("onelaunch")
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
        self._begin = self._tried = time.perf_counter()
        self._said = False  # that a part cannot be written
        self._places: dict[int, Path] = {}  # the part that holds a member's weights

    def load(self, shared: dict[tuple[str, ...], dict[str, Any]]) -> dict[int, Record]:
        """The records of an earlier start of the same sweep, by member. Raises CheckpointError if it is another sweep's."""
        if self.folder is None:
            return {}
        found: dict[int, Record] = {}
        try:
            if not (self.folder / ABOUT).exists():
                if any(self.folder.iterdir()):
                    raise _error(self.folder, f"is not empty and has no {ABOUT}: pass a new folder")
                self._write_about(self.folder / ABOUT)
                return {}
            earlier = self._read_about(self.folder / ABOUT)
            differs = [name for name in self.about if earlier.get(name) != self.about[name]]
            if differs:
                raise _error(self.folder, f"holds another sweep (with other {', '.join(differs)}): pass another folder")
            for part in _parts_of(self.folder):
                for record in self._read(part, shared):
                    found[record.index] = record
        except OSError as error:
            raise _error(self.folder, f"cannot be read ({reason_of(error)}): pass another folder") from error
        return found

    def _write_about(self, path: Path) -> None:
        content = {**self.about, "sha256": digest_of({}, json.dumps(self.about))}
        try:
            write_atomic(path, json.dumps(content, indent=1) + "\n")
        except OSError as error:
            raise _error(path, unwritable_reason(error)) from error

    def _read_about(self, path: Path) -> dict[str, Any]:
        try:
            about = _object(path.read_text(encoding="utf-8"))
            if "sha256" in about and about.pop("sha256") != digest_of({}, json.dumps(about)):
                raise ValueError("its checksum does not match")
        except (ValueError, RecursionError) as error:
            raise _error(path, f"is damaged ({error}): pass another folder as checkpoint") from error
        return about

    def _read(self, part: Path, shared: dict[tuple[str, ...], dict[str, Any]]) -> list[Record]:
        from safetensors import SafetensorError

        found = []
        try:
            with open_tensors(part) as file:
                about = _verified_about(file.metadata())
                tables = [shared.setdefault(tuple(entry.values()), entry) for entry in about["shared"]]
                names = _names_by_member(file.keys())
                for index, entry in about["members"].items():
                    tensors = _verified_tensors(file, names[index], entry)
                    fields = {name: entry[name] for name in SCALARS}
                    found.append(Record(
                        index=int(index), losses=tensors[f"{index}.losses"].numpy(), metrics=tuple(entry["metrics"]),
                        epochs=tensors[f"{index}.epochs"].numpy(), shared=tables[entry["shared"]], **fields,
                    ))  # fmt: skip
                    if entry["weights"]:
                        self._places[int(index)] = part
        except (SafetensorError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise _error(part, f"is damaged ({error}): delete this file, and its members train again") from error
        return found

    def weights(self, index: int) -> State | None:
        """The weights of a finished member; None if the folder does not have them, or no longer."""
        from safetensors import SafetensorError

        if index in self._pending:
            return self._pending[index][1] or None
        part = self._places.get(index)
        if part is None:
            return None
        prefix = f"{index}.weights."
        try:
            with open_tensors(part) as file:
                entry = _verified_about(file.metadata())["members"][str(index)]
                tensors = _verified_tensors(file, _names_by_member(file.keys())[str(index)], entry)
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            log.warning("%s cannot be read (%s): member %d is trained again", part, reason_of(error), index)
            return None
        return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}

    def add(self, record: Record, weights: State) -> None:
        """Keep a record, and write all new ones now and then. `weights`: empty if they are not kept."""
        if self.folder is None:
            return
        self._pending[record.index] = record, weights
        now = time.perf_counter()
        if now - self._tried > max(MIN_SECONDS, SHARE_OF_TIME * (now - self._begin)):
            self.flush()

    def flush(self) -> None:
        """Write the records that are not written yet. Where that fails, one warning says so, and they stay in memory."""
        if self.folder is None or not self._pending:
            return
        number = 1 + max((int(part.stem.split("-")[1]) for part in _parts_of(self.folder)), default=0)
        part = self.folder / f"part-{number:06}.safetensors"
        try:
            write_atomic(part, self._content())
        except OSError as error:
            if not self._said:
                log.warning("the sweep goes on, but its checkpoint %s %s", part, unwritable_reason(error))
            self._said = True
        else:
            self._places |= {index: part for index, (_, weights) in self._pending.items() if weights}
            self._pending = {}
        self._tried = time.perf_counter()

    def _content(self) -> bytes:
        """The records that are not written yet, as a part."""
        from safetensors.torch import save

        tables: list[dict[str, Any]] = []
        tensors: State = {}
        members = {}
        for index, (record, weights) in self._pending.items():
            if record.shared not in tables:
                tables.append(record.shared)
            own = {
                f"{index}.losses": torch.from_numpy(np.ascontiguousarray(record.losses)),
                f"{index}.epochs": torch.from_numpy(np.ascontiguousarray(record.epochs)),
                **{f"{index}.weights.{name}": tensor for name, tensor in weights.items()},
            }
            members[index] = {
                **{name: getattr(record, name) for name in SCALARS}, "metrics": list(record.metrics),
                "shared": tables.index(record.shared), "weights": bool(weights), "sha256": digest_of(own),
            }  # fmt: skip
            tensors |= own
        about = json.dumps({"members": members, "shared": tables})
        return save(tensors, {"about": about, "sha256": digest_of({}, about)})


def _parts_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob(PARTS) if path.stem.split("-")[1].isdecimal())


def _verified_about(metadata: dict[str, str] | None) -> dict[str, Any]:
    """What a part says about its members. Raises ValueError or KeyError if it is damaged."""
    given = dict(metadata or {})
    text, digest = given.pop("about"), given.pop("sha256", None)
    if given or (digest is not None and digest != digest_of({}, text)):
        raise ValueError("the checksum of its description does not match")
    return _object(text)


def _object(text: str) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("it is not a JSON object")
    return found


def _names_by_member(names: Iterable[str]) -> dict[str, list[str]]:
    """The names of tensors in a part, by the text of the member's number."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(name.split(".", 1)[0], []).append(name)
    return found


def _verified_tensors(file: Any, names: Sequence[str], entry: Mapping[str, Any]) -> State:
    tensors = {name: file.get_tensor(name) for name in names}
    if "sha256" in entry and entry["sha256"] != digest_of(tensors):
        raise ValueError("a checksum does not match")
    return tensors


@contextlib.contextmanager
def open_store(checkpoint: Any, about: Mapping[str, Any]) -> Iterator[Store]:
    """The Store of the argument `checkpoint`, locked against other processes. What is pending is written at the end."""
    if checkpoint is None:
        yield Store(None, dict(about))
        return
    folder = require_path("checkpoint", checkpoint)
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(exclusive_lock(folder.resolve()))  # the lock is beside the folder, which may be "."
            remove_leftovers(folder)
        except BlockingIOError as error:
            raise _error(folder, "is in use by another sweep: wait for its end, or pass another folder") from error
        except (OSError, ValueError) as error:
            raise _error(folder, unwritable_reason(error, "pass a writable folder")) from error
        store = Store(folder, dict(about))
        try:
            yield store
        finally:
            store.flush()


def _error(path: Path, message: str) -> CheckpointError:
    return CheckpointError(f"checkpoint={str(path)!r} {message}")
