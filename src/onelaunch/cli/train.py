"""`onelaunch train`: loads the data, trains a model, keeps the result in a run folder."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import typer
from torch import nn

from onelaunch.bench.results import commit
from onelaunch.cli.config import TASK_OF_LOSS, TrainConfig, make_config, read_config
from onelaunch.cli.remedies import in_flags
from onelaunch.cli.summary import next_step, summary_lines
from onelaunch.data import NAMES, Dataset, load, split
from onelaunch.data.table_encoding import load_table
from onelaunch.device import default_device, describe_machine, device_name
from onelaunch.errors import DivergedError, OnelaunchError, abbreviate_list, first_line, is_out_of_memory
from onelaunch.files import digest_of_file
from onelaunch.report.write import REPORT, write_report
from onelaunch.run.distributed import process_group, world
from onelaunch.table_names import is_table_file
from onelaunch.train.fit import fit_with
from onelaunch.train.history import History, summary
from onelaunch.train.loop import Listener
from onelaunch.train.mlp import mlp
from onelaunch.train.predict import float64_outputs
from onelaunch.train.predictions import describe_predictions
from onelaunch.train.predictor import load as load_run
from onelaunch.train.run_folder import CHECKPOINT, CURVES, DIGEST, RunFolder, config_of, has_other_data, is_finished
from onelaunch.train.scores import describe

MAX_DEVIATION = 30.0  # standard deviation above which the usual learning rates no longer fit


def run_train(config: Path | None, resume: Path | None, progress: bool, flags: dict[str, Any]) -> None:
    if resume is None:
        settings = make_config(read_config(config) if config else {}, flags)
    else:
        if config is not None or "out" in flags:
            raise OnelaunchError("resume takes its config and folder from the run: leave out CONFIG and --out")
        settings = make_config(read_config(config_of(resume)), flags)
    with process_group() as team:  # several processes if torchrun started this one
        if resume is not None and not flags and is_finished(resume):
            say("finished", f"the run in {resume} is done: nothing is left to train")
            if has_other_data(resume, _data_digest(settings)):
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
            train_into(folder, settings, dataset, model, progress, resumes=resume is not None)
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


def load_data(settings: TrainConfig) -> tuple[Dataset, TrainConfig]:
    """The data of the run with a test part, announced on the terminal, with notes on what may surprise; and the settings,
    completed by what the data says."""
    dataset = _load_table(settings) if is_table_file(Path(settings.data)) else _load_arrays(settings)
    say("data", dataset.source)
    if dataset.fallback:
        say("note", "this is a small stand-in: put the full set into a folder and pass --data-dir to train on it")
    if dataset.encoding is not None:
        for name, reason in dataset.encoding.encoder.left_out.items():
            say("note", f"column {name!r} is not used: it {reason}")
        say("task", f"{dataset.encoding.target.task} of {dataset.encoding.target.name!r}")
    elif dataset.classes is not None and len(dataset.classes) > max(20, len(dataset.x) // 2):
        say("note", f"{len(dataset.classes):,} classes in {len(dataset.x):,} rows: to learn numbers pass --loss mse")
    for what, array in (("features", dataset.x), ("targets", dataset.y)):
        if array.dtype == np.float32 and (spread := float(array.std())) > MAX_DEVIATION:
            say("note", f"the {what} vary by {spread:.3g} and are not scaled here: near 1 a network learns faster")
    return dataset, settings.resolved(len(dataset.x), dataset.classes is not None)


def _load_table(settings: TrainConfig) -> Dataset:
    task = settings.task or (TASK_OF_LOSS[settings.loss] if settings.loss else None)
    return load_table(
        Path(settings.data).expanduser(), target=settings.target, task=task, categorical=tuple(settings.categorical),
        fraction=settings.validation, seed=settings.seed,
    )  # fmt: skip


def _load_arrays(settings: TrainConfig) -> Dataset:
    values = None if settings.loss is None else settings.loss != "cross_entropy"
    dataset = load(settings.data, data_dir=settings.data_dir, target=settings.target, values=values)
    return dataset if dataset.test_x is not None else split(dataset, settings.validation, settings.seed)


def options_of(settings: TrainConfig, dataset: Dataset) -> dict[str, Any]:
    """The arguments of `fit` that describe the run, with classes by their numbers."""
    options, weight = settings.fit_options(), settings.class_weight
    if isinstance(weight, dict) and dataset.classes is not None:
        for label in weight:
            if str(label) not in dataset.classes:
                known = abbreviate_list(dataset.classes)
                raise OnelaunchError(
                    f"class_weight names {str(label)!r}, which is not a class of {dataset.name}: it has {known}"
                )
        options["class_weight"] = {dataset.classes.index(str(label)): value for label, value in weight.items()}
    return options


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
    folder: RunFolder, settings: TrainConfig, dataset: Dataset, model: nn.Module, progress: bool, *, resumes: bool
) -> None:
    """Train `model` and keep everything about the run in `folder`."""
    digest = _data_digest(settings)
    folder.refuse_other_data(settings.data, digest)
    device = "cpu" if settings.engine == "cpu" else default_device()
    model = model.to(device)
    folder.begin(
        settings.to_toml(),
        {
            "data": dataset.source,
            DIGEST: digest,
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
    )
    if dataset.encoding is not None:
        folder.save_table(dataset.encoding.to_json())
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
    last = history.epochs[-1 if history.best_epoch is None else history.best_epoch]
    best = "" if history.best_epoch is None else f"best epoch {last['epoch'] + 1} of {len(history.epochs)}: "
    say("result", f"{best}{summary(last)}, in {history.seconds:.3g} s")
    _score(folder, settings, dataset)
    for line in summary_lines(folder.path, history):
        _echo(line)
    _write_page(folder)
    say("predict", next_step(folder.path, dataset.encoding is not None))


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
    say("scores", f"{describe(found['scores'], found['constant'])}")


def _data_digest(settings: TrainConfig) -> str | None:
    """The digest of the data file; None for a data set that has a name, and for a file that is gone."""
    path = Path(settings.data).expanduser()
    return digest_of_file(path) if settings.data not in NAMES and path.is_file() else None


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
    names = ("engine", "reason", "precision", "plan", "allocations", "seconds", "startup_seconds")
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


def say(what: str, text: str) -> None:
    """Print one line, on rank 0 only."""
    _echo(f"{what:<8} {text}")


def _echo(line: str) -> None:
    if not world().leads:
        return
    try:
        typer.echo(line)
    except OSError:  # the reader of a pipe is gone (`| head -1`); the run goes on
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
