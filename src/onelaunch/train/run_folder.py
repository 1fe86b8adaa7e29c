"""The folder of a run: its configuration, its results, and everything that is needed to resume it.

config.toml              the resolved configuration
run.json                 versions, device, data, engine, status
metrics.jsonl            one line per epoch: metrics, and under "losses" the loss of each of its steps
curves.png               a figure of the metrics
checkpoint.safetensors   to resume from
model.safetensors        the trained weights, by the names of the model's state_dict
table.json               of a run on a table: how its columns are encoded, its target and its classes
predictions.json         how the held-out rows are predicted, and the worst mistakes (see `predictions.py`)

Every file is replaced atomically, except metrics.jsonl, which grows. After a kill, a resume drops its incomplete or surplus
lines.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from torch import nn

from onelaunch.errors import OnelaunchError, reason_of
from onelaunch.files import remove_leftovers, write_atomic
from onelaunch.operating_system import LOCKS, lock
from onelaunch.train.checkpoint import digest_of, unshared
from onelaunch.train.history import History, json_ready
from onelaunch.train.loop import Listener

CONFIG, ABOUT, METRICS, CURVES = "config.toml", "run.json", "metrics.jsonl", "curves.png"
BEST = "best"  # in the folder of a sweep: the run folder of its best model
CHECKPOINT, MODEL, TABLE, LOCK = "checkpoint.safetensors", "model.safetensors", "table.json", ".lock"
CHOSEN_AMONG = "chosen_among"  # the entry of run.json with the number of networks that the held-out rows compared
DIGEST = "data_digest"  # the entry of run.json with the digest of the data file
PREDICTIONS = "predictions.json"
COMPARE_FILE = "compare.json"  # written by `onelaunch compare`, whose folder is not that of a run


class RunFolder(Listener):
    """Writes the files of a run, and locks the folder until `close`, so that two processes cannot train into it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = _lock(path)
        self._config = ""
        self._about: dict[str, Any] = {}
        self._table: dict[str, Any] | None = None

    @classmethod
    def create(cls, out: str | None, name: str) -> RunFolder:
        """A new folder: `out`, which must be empty or absent, or a dated folder in runs/."""
        try:
            if out is not None:
                path = Path(out).expanduser()
                path.mkdir(parents=True, exist_ok=True)
                # A process that was killed before it wrote anything leaves hidden files only.
                if any(not entry.name.startswith(".") for entry in path.iterdir()):
                    resume = f", or go on with: onelaunch train --resume {shlex.quote(out)}" if is_run(path) else ""
                    raise OnelaunchError(f"out={out!r} is not empty: pass another folder{resume}")
            else:
                path = _dated_folder(Path("runs"), name)
            return cls(path)
        except (OSError, ValueError) as error:
            if isinstance(error, OnelaunchError):
                raise
            reason = f"out={out or 'runs'!r} cannot be written: {reason_of(error)}"
            raise OnelaunchError(f"{reason}; pass another --out") from error

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """The folder of an earlier run, to resume in."""
        config_of(path)
        try:
            folder = cls(path)
        except OSError as error:
            raise OnelaunchError(f"resume={str(path)!r} cannot be written: {error.strerror}") from error
        remove_leftovers(path)
        return folder

    @property
    def checkpoint(self) -> Path:
        return self.path / CHECKPOINT

    def refuse_lost_checkpoint(self) -> None:
        """Raise if the run has results but no checkpoint: it cannot resume, and a new run must not overwrite it."""
        metrics = self.path / METRICS
        results = (self.path / MODEL).exists() or (metrics.is_file() and metrics.stat().st_size)
        if results and not self.checkpoint.exists():
            raise OnelaunchError(
                f"resume={str(self.path)!r} has results but no {CHECKPOINT}: put it back, or repeat the run with "
                f"onelaunch train {self.path / CONFIG}"
            )

    def refuse_other_data(self, data: str, digest: str | None) -> None:
        """Raise if the run was trained on a file of other content than `digest` says; `data` is its name."""
        if self.checkpoint.exists() and has_other_data(self.path, digest):
            raise OnelaunchError(
                f"resume={str(self.path)!r}: {data} has changed since the run began: put the earlier file back, or start a "
                f"new run with onelaunch train {shlex.quote(str(self.path / CONFIG))}"
            )

    def begin(self, config: str, about: dict[str, Any], table: dict[str, Any] | None = None) -> None:
        """Set the configuration, the content of run.json and, for a table, how its columns are encoded.

        A new folder gets its config.toml at once, so that the run can be resumed whatever happens. The files of an earlier run
        do not change before `started`.
        """
        self._config, self._about, self._table = config, about, table
        if not (self.path / CONFIG).exists():
            self._write(CONFIG, config)

    def started(self, history: History) -> None:
        self._write(CONFIG, self._config)
        if self._table is not None:
            self._write(TABLE, json.dumps(self._table, indent=1) + "\n")
        self.describe(status="running")
        # The checkpoint knows which epochs are done: this drops the incomplete or surplus lines of a killed run.
        self._write(METRICS, "".join(_line(history, record) for record in history.epochs))

    def epoch(self, history: History, record: dict[str, Any]) -> None:
        with self._writing(METRICS) as path, open(path, "a", encoding="utf-8") as file:
            file.write(_line(history, record))
            file.flush()
            os.fsync(file.fileno())

    def describe(self, **about: Any) -> None:
        """Add entries to run.json."""
        self._about.update(about)
        self._write(ABOUT, json.dumps(json_ready(self._about), indent=1) + "\n")

    def finish(self, model: nn.Module, history: History) -> None:
        """Write the weights and the figure."""
        self.save_model(model)
        history.plot(self.path / CURVES)

    def save_model(self, model: nn.Module) -> None:
        from safetensors.torch import save

        tensors = unshared(model.state_dict())
        self._write(MODEL, save(tensors, {"sha256": digest_of(tensors)}))

    def save_predictions(self, content: dict[str, Any]) -> None:
        self._write(PREDICTIONS, json.dumps(json_ready(content)) + "\n")

    def _write(self, name: str, content: bytes | str) -> None:
        with self._writing(name) as path:
            write_atomic(path, content)

    @contextmanager
    def _writing(self, name: str) -> Iterator[Path]:
        try:
            yield self.path / name
        except OSError as error:
            raise OnelaunchError(
                f"{str(self.path / name)!r} cannot be written: {error.strerror}; free some space or pass another --out"
            ) from error

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def discard(self) -> None:
        """Delete the folder unless it has a checkpoint, which means that something was trained."""
        if self.checkpoint.exists():
            return
        with suppress(OSError):
            for name in (CONFIG, ABOUT, METRICS, TABLE, LOCK):
                (self.path / name).unlink(missing_ok=True)
            self.path.rmdir()


def is_run(path: Path) -> bool:
    return (path / CONFIG).is_file() and not (path / COMPARE_FILE).exists()


def is_finished(path: Path) -> bool:
    """Whether the run in this folder has finished and its files are all there."""
    complete = all((path / name).exists() for name in (CHECKPOINT, MODEL, METRICS))
    return complete and _about(path).get("status") == "finished"


def has_other_data(path: Path, digest: str | None) -> bool:
    """Whether the run in this folder began with a data file of another digest; False where one of the two is unknown."""
    began_with = _about(path).get(DIGEST)
    return began_with is not None and digest is not None and began_with != digest


def networks_compared(path: Path) -> int:
    """The number of networks among which held-out rows chose that of this folder: more than 1 for the best of a sweep."""
    found = _about(path).get(CHOSEN_AMONG, 1)
    return found if isinstance(found, int) else 1


def _about(path: Path) -> dict[str, Any]:
    """The content of run.json; empty if there is none that can be read."""
    try:
        about = json.loads((path / ABOUT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return about if isinstance(about, dict) else {}


def config_of(path: Path) -> Path:
    """The path of the run's config.toml in folder `path`; raises OnelaunchError if it is not the folder of a run."""
    if (path / COMPARE_FILE).exists():  # a run would overwrite the report of the comparison
        raise OnelaunchError(f"resume={str(path)!r} is the folder of a comparison: pass the folder of a run")
    config = path / CONFIG
    if not config.is_file():
        raise OnelaunchError(f"resume={str(path)!r} is not a run folder (it has no {CONFIG}): pass the folder of a run")
    return config


def _line(history: History, record: dict[str, Any]) -> str:
    first = history.epochs[record["epoch"] - 1]["step"] if record["epoch"] else 0
    return json.dumps(json_ready({**record, "losses": history.losses[first : record["step"]]})) + "\n"


def _dated_folder(parent: Path, name: str) -> Path:
    stem = f"{datetime.now():%Y%m%d-%H%M%S}-{name}"
    for number in range(1, 1000):
        path = parent / (stem if number == 1 else f"{stem}-{number}")
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path
    raise OnelaunchError(f"out: a thousand folders are called {stem}: pass --out")


def _lock(path: Path) -> int | None:
    if not LOCKS:
        return None
    handle = os.open(path / LOCK, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        lock(handle)
    except BlockingIOError:
        os.close(handle)
        raise OnelaunchError(f"{str(path)!r} is in use by another run: wait for it, or pass another folder") from None
    return handle
