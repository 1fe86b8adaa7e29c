"""`ol.fit`: train a model on arrays, on the fastest engine that can run it here."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from torch import nn

from onelaunch.errors import ArgumentTypeError, OnelaunchError
from onelaunch.train.history import History
from onelaunch.train.inputs import make_run
from onelaunch.train.loop import Listener, drive
from onelaunch.train.progress import make_progress


def fit(
    model: nn.Module,
    x: Any,
    y: Any,
    *,
    epochs: int | None = None,
    steps: int | None = None,
    batch_size: int = 32,
    optimizer: str = "sgd",
    lr: float = 1e-3,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    betas: tuple[float, float] | None = None,
    eps: float = 1e-8,
    schedule: str = "constant",
    loss: str = "cross_entropy",
    label_smoothing: float = 0.0,
    validation: tuple[Any, Any] | None = None,
    drop_last: bool = False,
    precision: str = "auto",
    engine: str = "auto",
    memory: str = "plan",
    seed: int = 0,
    checkpoint: str | Path | None = None,
    resume: bool = False,
    progress: bool = True,
) -> History:
    """Train `model` in place and return what happened.

    x: rows of float features, or of uint8 (which mean value / 255); arrays, tensors or lists.
    y: class numbers for loss="cross_entropy", else float targets ("mse") or values in [0, 1] ("bce_with_logits").
    epochs or steps: how long to train; one of the two.
    schedule: "constant", "linear", "cosine" or "one_cycle", stepped once a batch over the whole run.
    validation: a pair (x, y), evaluated after each epoch.
    precision: "auto" is fp32 on a CPU; "tf32", "bf16" and "fp16" where the device has them.
    engine: "auto" picks the fastest that can run this model here; `History.reason` says which and why.
    checkpoint: a file written after each epoch and on Ctrl-C; resume=True goes on from it, to the same bits as a run that
    was never stopped. A new run (resume=False) moves an existing file aside to `name.1`, `name.2`, ….

    Rows are visited in the order `ol.permutation(len(x), seed, epoch)`. The same seed gives the same bits on one machine.
    """
    options = {
        "epochs": epochs, "steps": steps, "batch_size": batch_size, "optimizer": optimizer, "lr": lr,
        "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay, "betas": betas, "eps": eps,
        "schedule": schedule, "loss": loss, "label_smoothing": label_smoothing, "drop_last": drop_last,
        "precision": precision, "engine": engine, "memory": memory, "seed": seed,
    }  # fmt: skip
    return fit_with(
        model, x, y, options, validation=validation, checkpoint=checkpoint, resume=resume, progress=progress
    )


def fit_with(
    model: nn.Module,
    x: Any,
    y: Any,
    options: dict[str, Any],
    *,
    validation: tuple[Any, Any] | None = None,
    checkpoint: str | Path | None = None,
    resume: bool = False,
    progress: bool = True,
    listener: Listener | None = None,
) -> History:
    """`fit` with its options as a dict, and a listener to its course; what the command line calls."""
    started = time.perf_counter()
    if checkpoint is not None and not isinstance(checkpoint, str | Path):
        raise ArgumentTypeError(f"checkpoint={checkpoint!r} is not a path")
    if resume and checkpoint is None:
        raise OnelaunchError("resume=True needs checkpoint=, the file to go on from")
    path = None if checkpoint is None else Path(checkpoint)
    try:
        is_folder = path is not None and path.is_dir()
        is_special = path is not None and path.exists() and not path.is_file()
        path = path.resolve() if path is not None and path.is_symlink() else path  # written where the link points
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: a link to itself, before Python 3.13
        raise OnelaunchError(f"checkpoint={str(path)!r:.80} is not a path ({error!s:.80})") from error
    if is_folder:
        raise OnelaunchError(f"checkpoint={str(path)!r} is a folder: pass a file name, such as 'run.safetensors'")
    if is_special:
        raise OnelaunchError(
            f"checkpoint={str(path)!r} is a device or a pipe: pass a file name, such as 'run.safetensors'"
        )
    run = make_run(model, x, y, validation, options)
    bar = make_progress(progress)
    return drive(run, checkpoint=path, resume=resume, progress=bar, listener=listener or Listener(), started=started)
