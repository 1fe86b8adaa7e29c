"""`ol.fit`: train a model on arrays, with the fastest engine that can run it on this machine."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from onelaunch.errors import OnelaunchError, require_path
from onelaunch.run.distributed import world
from onelaunch.run.early_stopping import EarlyStopping
from onelaunch.run.options import Options
from onelaunch.train.argument_names import advise
from onelaunch.train.callbacks import Callback, WithCallbacks, check_callbacks
from onelaunch.train.history import History
from onelaunch.train.inputs import make_run
from onelaunch.train.loop import Listener, drive
from onelaunch.train.memory import check_room_to_save
from onelaunch.train.predict import remember_task
from onelaunch.train.progress import make_progress


@advise()
def fit(
    model: nn.Module,
    x: Any,
    y: Any = None,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    batch_size: int = 32,
    optimizer: str = "adam",
    lr: float = 1e-3,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    betas: tuple[float, float] | None = None,
    eps: float = 1e-8,
    schedule: str = "constant",
    loss: str | Callable[[Any, Any], Tensor] = "cross_entropy",
    label_smoothing: float = 0.0,
    class_weight: str | Mapping[Any, float] | Sequence[float] | None = None,
    sample_weight: Any = None,
    clip_norm: float | None = None,
    validation: float | tuple[Any, Any] | None = None,
    metrics: Sequence[str] = (),
    early_stopping: int | EarlyStopping | None = None,
    callbacks: Sequence[Callback] = (),
    drop_last: bool = False,
    precision: str = "auto",
    engine: str = "auto",
    memory: str = "plan",
    seed: int = 0,
    checkpoint: str | Path | None = None,
    resume: bool = False,
    progress: bool = True,
) -> History:
    """Train `model` in place and return its history.

    x: rows of float features or of uint8 (meaning value / 255), as an array, a tensor or nested lists; a tuple of them for a
    model with several inputs; or a DataLoader of batches (x, y), which the seed shuffles anew in each epoch.
    y: class numbers, class names or one-hot rows for loss="cross_entropy", float targets for "mse", values in [0, 1] for
    "bce_with_logits".
    loss: one of these names, or a function of (output, y) that returns the mean over the batch.
    epochs or steps: how long to train; pass one of the two.
    optimizer: "sgd" (takes momentum, nesterov), "adam", "adamw" (betas, eps), "rmsprop" (betas, eps, momentum), "lion" (betas).
    weight_decay: added to the gradient; decoupled for "adamw" and "lion".
    betas: None means the optimizer's own: (0.9, 0.999) for "adam" and "adamw", (0.9, 0.99) for "lion" and "rmsprop", whose
    alpha is betas[1].
    schedule: "constant", "linear", "cosine" or "one_cycle", stepped once per batch over the whole run.
    class_weight: "balanced" (rows / (classes * rows of the class)), {class: weight} where a class that is not named has 1, or
    a list with one weight per class.
    sample_weight: one number per row, 0 or more. A batch's loss is the weighted mean sum(w * l) / sum(w), where a row's w is
    its class's weight times its own. The validation loss is not weighted.
    clip_norm: the largest global norm of the gradient; a longer one is scaled down, as by `clip_grad_norm_`.
    validation: a pair (x, y), or the fraction of the rows to hold out (with the classes' proportions); evaluated after each
    epoch.
    metrics: further validation metrics by scikit-learn's definitions, such as ("f1", "roc_auc") or ("r2", "mae"). Of two
    classes, "f1", "precision" and "recall" are those of class 1, the second name in sorted order; of more, means over them.
    early_stopping: the number of epochs without a better validation loss after which the run ends with the weights of its best
    epoch, or an `ol.EarlyStopping`.
    callbacks: functions or objects that are called with the History after each epoch, such as `ol.CsvLogger(path)`. The
    model has the weights of that epoch then, and what they change in it counts from the next step on (one with
    `needs_weights = False` neither reads nor changes the model).
    precision: "auto" is fp32 on a CPU; "tf32", "bf16" and "fp16" on devices that have them.
    engine: "auto" selects the fastest that can run this model here; `History.reason` says which and why.
    checkpoint: a file written after each epoch and on Ctrl-C. resume=True continues from it, to the same bits as a run that
    was never stopped. A new run (resume=False) moves an existing file aside to `name.1`, `name.2`, ….

    Rows are visited in the order `ol.permutation(len(x), seed, epoch)`. The same seed gives the same bits on one machine.
    """
    arguments = locals()
    options = {field.name: arguments[field.name] for field in dataclasses.fields(Options)}
    return fit_with(
        model, x, y, options, sample_weight=sample_weight, validation=validation, callbacks=callbacks, checkpoint=checkpoint,
        resume=resume, progress=progress,
    )  # fmt: skip


def fit_with(
    model: nn.Module,
    x: Any,
    y: Any,
    options: dict[str, Any],
    *,
    sample_weight: Any = None,
    validation: float | tuple[Any, Any] | None = None,
    callbacks: Sequence[Callback] = (),
    checkpoint: str | Path | None = None,
    resume: bool = False,
    progress: bool = True,
    listener: Listener | None = None,
) -> History:
    """`fit` with the fields of Options as a dict and with a listener, for the command line."""
    started = time.perf_counter()
    if resume and checkpoint is None:
        raise OnelaunchError("resume=True needs checkpoint=, the file to resume from")
    path = None if checkpoint is None else _checked_path(require_path("checkpoint", checkpoint))
    called = check_callbacks(callbacks)
    run = make_run(model, x, y, validation, options, sample_weight=sample_weight)
    if path is not None and world().leads:
        trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        check_room_to_save(trained, run.spec, trains_here=run.device.type == "cpu")
    if run.loss_function is None:
        remember_task(run, flat=run.classes is not None or (y is not None and np.ndim(y) == 1))
    bar = make_progress(progress)
    told = WithCallbacks(listener or Listener(), called)
    return drive(run, checkpoint=path, resume=resume, progress=bar, listener=told, started=started)


def _checked_path(path: Path) -> Path:
    """The path of a regular or missing file; a link is resolved, so that its target is written and not the link replaced."""
    try:
        kind = "a folder" if path.is_dir() else "a device or a pipe" if path.exists() and not path.is_file() else ""
        resolved = path.resolve() if path.is_symlink() else path
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: a link to itself, before Python 3.13
        raise OnelaunchError(f"checkpoint={str(path)!r:.80} is not a path ({error!s:.80})") from error
    if kind:
        raise OnelaunchError(f"checkpoint={str(path)!r} is {kind}: pass a file name, such as 'run.safetensors'")
    return resolved
