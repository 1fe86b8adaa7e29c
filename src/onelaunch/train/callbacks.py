"""Callbacks of `fit`: any callable that takes the History, and two loggers.

A callback may change the model that it knows of, and the run goes on with the change (`train/run_session.py`), unless it says
`needs_weights = False`: then the model does not hold the epoch's weights when it is called.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from onelaunch.errors import ArgumentTypeError, OnelaunchError, require_path, unwritable_reason
from onelaunch.files import write_atomic
from onelaunch.train.history import History, flat_epochs
from onelaunch.train.loop import Listener

Callback = Callable[[History], object]


def check_callbacks(callbacks: Any) -> tuple[Callback, ...]:
    """The argument `callbacks` as a tuple; raises ArgumentTypeError if an entry cannot be called."""
    if not isinstance(callbacks, Sequence):
        raise ArgumentTypeError(f"callbacks={callbacks!r:.60} is not a list: pass callbacks=[…]")
    for callback in callbacks:
        if not callable(callback) or isinstance(callback, type):
            raise ArgumentTypeError(f"callbacks has {callback!r:.60}, which cannot be called with a History")
    return tuple(callbacks)


def act_on_model(callbacks: Iterable[Callback]) -> bool:
    """Whether a callback may read or change the model: all that do not say `needs_weights = False`."""
    return any(getattr(callback, "needs_weights", True) for callback in callbacks)


class WithCallbacks(Listener):
    """Passes everything on to another listener, and calls the callbacks with the History after each epoch."""

    def __init__(self, listener: Listener, callbacks: tuple[Callback, ...]) -> None:
        self.listener, self.callbacks = listener, callbacks
        self.needs_weights = act_on_model(callbacks)

    def started(self, history: History) -> None:
        self.listener.started(history)

    def epoch(self, history: History, record: dict[str, Any]) -> None:
        self.listener.epoch(history, record)
        for callback in self.callbacks:
            callback(history)


class CsvLogger:
    """A callback that keeps a CSV file up to date: one line per epoch, with the columns of `History.to_pandas()`.

    The file is replaced atomically after each epoch. A resumed run continues it, because the History has its earlier epochs.
    """

    needs_weights = False  # of the model: it reads the History only

    def __init__(self, path: str | Path) -> None:
        self.path = require_path("path", path)

    def __call__(self, history: History) -> None:
        rows = flat_epochs(history.epochs)
        columns = list(dict.fromkeys(name for row in rows for name in row))
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self.path, text.getvalue())
        except (OSError, ValueError) as error:
            raise OnelaunchError(f"path={str(self.path)!r} {unwritable_reason(error)}") from error


class TensorBoardLogger:
    """A callback that writes loss, accuracy, metrics and learning rate for TensorBoard, one point per epoch, into `folder`.

    It needs the package tensorboard. A resumed run writes its earlier epochs again, which TensorBoard shows once.
    """

    needs_weights = False

    def __init__(self, folder: str | Path) -> None:
        folder = require_path("folder", folder)
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise OnelaunchError("TensorBoardLogger needs tensorboard: pip install tensorboard") from error
        self._writer = SummaryWriter(str(folder), purge_step=0)
        self._written = 0

    def __call__(self, history: History) -> None:
        for row in flat_epochs(history.epochs[self._written :]):
            for name, value in row.items():
                if name not in ("epoch", "step") and value is not None:
                    self._writer.add_scalar(name, value, row["epoch"])
        self._written = len(history.epochs)
        self._writer.flush()
