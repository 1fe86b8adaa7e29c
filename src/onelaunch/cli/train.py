"""`onelaunch train`: loads the data, trains a model, keeps the result in a run folder."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from onelaunch.bench.results import commit
from onelaunch.cli.config import TrainConfig, make_config, read_config
from onelaunch.cli.remedies import in_flags
from onelaunch.cli.run_data import data_digest, load_data, options_of
from onelaunch.cli.say import echo, say
from onelaunch.cli.summary import next_step, summary_lines
from onelaunch.data import Dataset
from onelaunch.device import default_device, describe_machine, device_name
from onelaunch.errors import DivergedError, OnelaunchError, first_line, is_out_of_memory
from onelaunch.report.write import REPORT, write_report
from onelaunch.run.distributed import process_group, world
from onelaunch.train.fit import fit_with
from onelaunch.train.history import History, summary
from onelaunch.train.loop import Listener
from onelaunch.train.mlp import mlp
from onelaunch.train.predict import float64_outputs
from onelaunch.train.predictions import describe_predictions
from onelaunch.train.predictor import load as load_run
from onelaunch.train.run_folder import (
    CHECKPOINT,
    CHOSEN_AMONG,
    CURVES,
    DIGEST,
    RunFolder,
    config_of,
    has_other_data,
    is_finished,
    networks_compared,
)
from onelaunch.train.scores import describe

RISEN = 1.2  # a validation loss of so many times its lowest value


def run_train(config: Path | None, resume: Path | None, progress: bool, flags: dict[str, Any]) -> None:
    if resume is None:
        settings = make_config(read_config(config) if config else {}, flags)
    else:
        if config is not None or "out" in flags:
            raise OnelaunchError("resume takes its config and folder from the run: leave out CONFIG and --out")
        # A run of a version without `stratify` has held out its rows regardless of their classes.
        settings = make_config({"stratify": False, **read_config(config_of(resume))}, flags)
    with process_group() as team:  # several processes if torchrun started this one
        if resume is not None and not flags and is_finished(resume):
            say("finished", f"the run in {resume} is done: nothing is left to train")
            if has_other_data(resume, data_digest(settings)):
                say("note", f"{settings.data} has changed since: a new run learns from it")
        elif team.leads:
            _lead(settings, resume, progress)
        else:
            _follow(settings, resume)


def _follow(settings: TrainConfig, resume: Path | None) -> None:
    """Train along with rank 0, which alone writes and prints."""
    dataset, settings = load_data(settings)
    model = _build_and_announce(settings, dataset).to(default_device())
    checkpoint = None if resume is None else resume / CHECKPOINT
    existing = checkpoint if checkpoint and checkpoint.exists() else None
    fit_with(
        model, dataset.x, dataset.y, options_of(settings, dataset), validation=(dataset.test_x, dataset.test_y),
        checkpoint=existing, resume=existing is not None, progress=False,
    )  # fmt: skip


def _lead(settings: TrainConfig, resume: Path | None, progress: bool) -> None:
    dataset, settings = load_data(settings)
    model = _build_and_announce(settings, dataset)
    folder = RunFolder.create(settings.out, Path(settings.data).stem) if resume is None else RunFolder.open(resume)
    try:
        folder.refuse_lost_checkpoint()
        with fits_into_memory():
            compared = networks_compared(folder.path)
            train_into(folder, settings, dataset, model, progress, resumes=resume is not None, chosen_among=compared)
    except (OnelaunchError, KeyboardInterrupt):
        if resume is None:
            folder.discard()  # keeps a folder that has a checkpoint
        raise
    finally:
        folder.close()


@contextmanager
def fits_into_memory() -> Iterator[None]:
    """Turn every kind of out-of-memory error into an OnelaunchError with its remedy."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise OnelaunchError(
            f"this run does not fit into memory ({first_line(error)}): pass smaller "
            "--hidden or --layers, a smaller --batch-size or fewer rows of data"
        ) from error


def widths_of(settings: TrainConfig, dataset: Dataset) -> list[int]:
    """All widths of the network: as given, or the hidden widths between those that the data needs."""
    if settings.layers is not None:
        return settings.layers
    classes = dataset.classes is not None and settings.loss == "cross_entropy"
    outputs = len(dataset.classes or ()) if classes else int(dataset.y[0].size)
    return [int(dataset.x[0].size), *settings.hidden, outputs]


def build(settings: TrainConfig, widths: list[int]) -> nn.Module:
    names = ("activation", "dropout", "batch_norm", "seed")
    return mlp(widths, **{name: getattr(settings, name) for name in names})


def _build_and_announce(settings: TrainConfig, dataset: Dataset) -> nn.Module:
    widths = widths_of(settings, dataset)
    model = build(settings, widths)
    count = sum(parameter.numel() for parameter in model.parameters())
    say("model", f"{'-'.join(map(str, widths))}, {settings.activation}, {count:,} parameters")
    return model


class _Narrator(Listener):
    """Prints what a run starts with, and keeps its folder up to date."""

    def __init__(self, folder: RunFolder, resumes: bool) -> None:
        self.folder, self.resumes = folder, resumes
        self.history: History | None = None  # for a run that is interrupted or diverges

    def started(self, history: History) -> None:
        self.history = history
        self.folder.started(history)
        say("engine", in_flags(history.reason, TrainConfig.__dataclass_fields__))
        if self.resumes:
            say("resume", f"from step {len(history.losses):,}" if history.losses else "from the beginning")

    def epoch(self, history: History, record: dict[str, Any]) -> None:
        self.folder.epoch(history, record)


def train_into(
    folder: RunFolder, settings: TrainConfig, dataset: Dataset, model: nn.Module, progress: bool, *, resumes: bool,
    chosen_among: int = 1,
) -> None:  # fmt: skip
    """Train `model` and keep everything about the run in `folder`. `chosen_among`: networks that the held-out rows compared."""
    digest = data_digest(settings)
    folder.refuse_other_data(settings.data, digest)
    device = "cpu" if settings.engine == "cpu" else default_device()
    model = model.to(device)
    folder.begin(
        settings.to_toml(),
        {
            "data": dataset.source,
            "notes": list(dataset.notes),
            DIGEST: digest,
            CHOSEN_AMONG: chosen_among,
            "table": dataset.encoding is not None,
            "classes": dataset.classes,
            "loss": settings.loss,
            "network": _network(settings, dataset),
            "baseline": _baseline(settings, dataset),
            "model": str(model),
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "device": device_name(next(model.parameters()).device),
            "machine": describe_machine(),
            "commit": commit(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        },
        None if dataset.encoding is None else dataset.encoding.to_json(),
    )
    narrator = _Narrator(folder, resumes)
    try:
        history = fit_with(
            model, dataset.x, dataset.y, options_of(settings, dataset), validation=(dataset.test_x, dataset.test_y),
            checkpoint=folder.checkpoint, resume=folder.checkpoint.exists(), progress=progress,
            listener=narrator,
        )  # fmt: skip
    except KeyboardInterrupt:
        if folder.checkpoint.exists():
            folder.save_model(model)
            folder.describe(status="interrupted", **_outcome(narrator.history))
            if world().size > 1:
                program = f"torchrun --nproc-per-node {world().size} -m onelaunch"
            else:
                program = "onelaunch" if shutil.which("onelaunch") else f"{sys.executable} -m onelaunch"
            say("stopped", f"saved; continue with: {program} train --resume {shlex.quote(str(folder.path))}")
            _draw(folder, narrator.history)
            raise KeyboardInterrupt("announced") from None
        raise
    except DivergedError as error:
        folder.describe(status=str(error), **_outcome(narrator.history))
        _draw(folder, narrator.history)
        raise
    folder.finish(model, history)
    folder.describe(status="finished", **_outcome(history))
    best = "" if history.best_epoch is None else f"best epoch {history.best_epoch + 1} of {len(history.epochs)}: "
    say("result", f"{best}{summary(history.kept)}, in {history.seconds:.3g} s")
    if advice := _advice(history):
        say("note", advice)
        folder.describe(notes=[*dataset.notes, advice], advice=advice)
    _score(folder, settings, dataset)
    for line in summary_lines(folder.path, history):
        echo(line)
    _write_page(folder)
    say("predict", next_step(folder.path, dataset.encoding is not None))


def _advice(history: History) -> str:
    """What to do about a run whose validation loss has risen since its best epoch; empty for another one."""
    validated = [epoch["validation"]["loss"] for epoch in history.epochs if epoch["validation"]]
    if history.best_epoch is not None or not validated or not validated[-1] > RISEN * min(validated):
        return ""
    best = validated.index(min(validated)) + 1
    return f"the validation loss was lowest in epoch {best} ({min(validated):.4g}): --early-stopping 5 keeps that model"


def _score(folder: RunFolder, settings: TrainConfig, dataset: Dataset) -> None:
    """Print the scores of the held-out rows, computed by the Predictor that the folder gives, and add them to run.json."""
    if settings.loss == "bce_with_logits" or dataset.test_x is None or dataset.test_y is None:
        return
    y = dataset.test_y if dataset.test_values is None else dataset.test_values
    predictor = load_run(folder.path)
    outputs = float64_outputs(predictor.model, dataset.test_x)
    found = predictor.scores_of(outputs, y)
    folder.describe(scores=found)
    folder.save_predictions(describe_predictions(predictor, outputs, y, dataset))
    say("scores", describe(found["scores"], found["constant"], predictor.classes))


def _network(settings: TrainConfig, dataset: Dataset) -> dict[str, Any]:
    """The arguments of `mlp`, from which `ol.load` builds the network."""
    names = ("activation", "dropout", "batch_norm")
    return {"widths": widths_of(settings, dataset), **{name: getattr(settings, name) for name in names}}


def _baseline(settings: TrainConfig, dataset: Dataset) -> float:
    """The best constant prediction: the most frequent class number, or the mean in the units of the targets."""
    if settings.loss == "cross_entropy":
        return float(np.bincount(dataset.y).argmax())
    if dataset.encoding is not None:
        return float(dataset.encoding.target.scaling.mean[0])
    return float(dataset.y.mean())


def _outcome(history: History | None) -> dict[str, Any]:
    """The entries of run.json about a run that has started."""
    names = ("engine", "reason", "precision", "plan", "allocations", "seconds", "startup_seconds", "best_epoch")
    return {} if history is None else {name: getattr(history, name) for name in names}


def _draw(folder: RunFolder, history: History | None) -> None:
    """Curves and page of an unfinished run. A folder without a checkpoint is about to be removed, and gets none."""
    if not folder.checkpoint.exists():
        return
    with suppress(OnelaunchError):  # the reason why the run ended matters more
        if history is not None and history.losses:
            history.plot(folder.path / CURVES)
        _write_page(folder)


def _write_page(folder: RunFolder) -> None:
    if (curves := folder.path / CURVES).exists():
        say("curves", str(curves))
    say("run", str(folder.path))
    say("report", str(write_report([folder.path], folder.path / REPORT)))
