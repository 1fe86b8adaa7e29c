"""The folder of a run: what was asked, on what, what happened, and all that is needed to go on.

config.toml              the resolved configuration
run.json                 versions, device, data, engine, status
metrics.jsonl            a line an epoch: metrics, and under "losses" the loss of each of its steps
curves.png               the same, drawn
checkpoint.safetensors   to resume from
model.safetensors        the trained weights, by the names of the model's state_dict

Every file is replaced atomically, but metrics.jsonl, which grows; a torn or surplus line after a kill is dropped on resume.
"""

from __future__ import annotations

import json
import os
from datetime import datetime
from pathlib import Path
from typing import Any

from torch import nn

from onelaunch.errors import OnelaunchError
from onelaunch.files import remove_leftovers, write_atomic
from onelaunch.train.history import History
from onelaunch.train.loop import Listener

CONFIG, ABOUT, METRICS, CURVES = "config.toml", "run.json", "metrics.jsonl", "curves.png"
CHECKPOINT, MODEL, LOCK = "checkpoint.safetensors", "model.safetensors", ".lock"


class RunFolder(Listener):
    """Holds a lock until it is closed, so that two processes cannot train into one folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = _lock(path)
        self._config = ""
        self._about: dict[str, Any] = {}

    @classmethod
    def create(cls, out: str | None, name: str) -> RunFolder:
        """A new folder: `out`, which must be empty or not there, or a dated one under runs/."""
        try:
            if out is not None:
                path = Path(out)
                path.mkdir(parents=True, exist_ok=True)
                if any(path.iterdir()):
                    raise OnelaunchError(
                        f"out={out!r} is not empty: pass another folder, or --resume {out} to go on with the run in it"
                    )
            else:
                path = _dated_folder(Path("runs"), name)
            return cls(path)
        except OSError as error:
            raise OnelaunchError(f"out={out or 'runs'!r} cannot be written: {error.strerror}; pass --out") from error

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """The folder of an earlier run, to go on in."""
        if not (path / CONFIG).is_file():
            raise OnelaunchError(
                f"resume={str(path)!r} is not a run folder (it has no {CONFIG}): pass the folder of a run"
            )
        try:
            folder = cls(path)
        except OSError as error:
            raise OnelaunchError(f"resume={str(path)!r} cannot be written: {error.strerror}") from error
        remove_leftovers(path)
        return folder

    @property
    def checkpoint(self) -> Path:
        return self.path / CHECKPOINT

    def begin(self, config: str, about: dict[str, Any]) -> None:
        """What `started` writes once the run is accepted: until then an earlier run's files stay as they are."""
        self._config, self._about = config, about

    def started(self, history: History) -> None:
        write_atomic(self.path / CONFIG, self._config)
        self.describe(status="running")
        # The checkpoint knows which epochs are done: a torn or surplus line after a kill goes.
        write_atomic(self.path / METRICS, "".join(_line(history, record) for record in history.epochs))

    def epoch(self, history: History, record: dict[str, Any]) -> None:
        with open(self.path / METRICS, "a", encoding="utf-8") as file:
            file.write(_line(history, record))
            file.flush()
            os.fsync(file.fileno())

    def describe(self, **about: Any) -> None:
        """Add to run.json."""
        self._about.update(about)
        write_atomic(self.path / ABOUT, json.dumps(self._about, indent=1) + "\n")

    def finish(self, model: nn.Module, history: History) -> None:
        self.save_model(model)
        history.plot(self.path / CURVES)

    def save_model(self, model: nn.Module) -> None:
        from safetensors.torch import save

        tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in model.state_dict().items()}
        write_atomic(self.path / MODEL, save(tensors))

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def discard(self) -> None:
        """Remove a folder in which nothing was trained."""
        if self.checkpoint.exists():
            return
        for name in (CONFIG, ABOUT, METRICS, LOCK):
            (self.path / name).unlink(missing_ok=True)
        if not any(self.path.iterdir()):
            self.path.rmdir()


def _line(history: History, record: dict[str, Any]) -> str:
    first = history.epochs[record["epoch"] - 1]["step"] if record["epoch"] else 0
    return json.dumps({**record, "losses": history.losses[first : record["step"]]}) + "\n"


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
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    handle = os.open(path / LOCK, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise OnelaunchError(
            f"{str(path)!r} is in use by another training process: wait for it, or pass another folder"
        ) from None
    return handle
