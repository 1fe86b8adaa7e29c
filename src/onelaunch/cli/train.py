"""`onelaunch train`: data, a model, a run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from torch import nn

from onelaunch.cli.config import TrainConfig, make_config, read_config
from onelaunch.cli.flags import with_flags
from onelaunch.data import Dataset, load, split
from onelaunch.device import default_device, describe_machine, device_name
from onelaunch.errors import DivergedError, OnelaunchError
from onelaunch.train.build import mlp
from onelaunch.train.checkpoint import load_checkpoint
from onelaunch.train.fit import fit_with
from onelaunch.train.history import History, summary
from onelaunch.train.run_folder import CONFIG, CURVES, RunFolder


@with_flags(TrainConfig)
def train(
    config: Annotated[Path | None, typer.Argument(help="A TOML file; its keys are the flags below.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the run in this folder.")] = None,
    progress: Annotated[bool, typer.Option(help="Show a bar on a terminal.")] = True,
    flags: dict[str, Any] | None = None,
) -> None:
    """Train an MLP and keep the result in a run folder."""
    flags = flags or {}
    if resume is None:
        settings = make_config(read_config(config) if config else {}, flags)
    else:
        if config is not None or "out" in flags:
            raise OnelaunchError("resume takes its config and folder from the run: leave out CONFIG and --out")
        if not (resume / CONFIG).is_file():
            raise OnelaunchError(
                f"resume={str(resume)!r} is not a run folder (it has no {CONFIG}): pass the folder of a run"
            )
        settings = make_config(read_config(resume / CONFIG), flags)
    dataset = _load(settings)
    model = _build(settings, dataset)
    folder = RunFolder.create(settings.out, _name(settings)) if resume is None else RunFolder.open(resume)
    try:
        _train(folder, settings, dataset, model, progress)
    except DivergedError:
        raise
    except OnelaunchError:
        if resume is None:
            folder.discard()
        raise


def _load(settings: TrainConfig) -> Dataset:
    dataset = load(
        settings.data, data_dir=Path(settings.data_dir) if settings.data_dir else None, target=settings.target
    )
    if dataset.test_x is None:
        dataset = split(dataset, settings.validation, settings.seed)
    _say("data", dataset.source)
    if dataset.fallback:
        _say("note", "this is a small stand-in: put the full set into a folder and pass --data-dir to train on it")
    return dataset


def _build(settings: TrainConfig, dataset: Dataset) -> nn.Module:
    inputs = int(dataset.x[0].size)
    if dataset.classes is not None and settings.loss == "cross_entropy":
        outputs = len(dataset.classes)
    else:
        outputs = int(dataset.y[0].size)
    widths = settings.layers or [inputs, *settings.hidden, outputs]
    model = mlp(
        widths,
        activation=settings.activation,
        dropout=settings.dropout,
        batch_norm=settings.batch_norm,
        seed=settings.seed,
    )
    count = sum(parameter.numel() for parameter in model.parameters())
    _say("model", f"{'-'.join(map(str, widths))}, {settings.activation}, {count:,} parameters")
    return model


def _train(folder: RunFolder, settings: TrainConfig, dataset: Dataset, model: nn.Module, progress: bool) -> None:
    device = "cpu" if settings.engine == "cpu" else default_device()
    model = model.to(device)
    resumed = folder.checkpoint.exists()  # a run killed before its first checkpoint starts at the beginning
    if resumed:
        found = load_checkpoint(folder.checkpoint)
        before = History(losses=found.losses.tolist(), epochs=found.about["epochs"])
        folder.restart_metrics(before)
        _say("resume", f"from step {found.step:,}")
    else:
        folder.restart_metrics(None)
    folder.write_config(settings.to_toml())
    folder.describe(
        status="running",
        data=dataset.source,
        classes=dataset.classes,
        model=str(model),
        device=device_name(next(model.parameters()).device),
        machine=describe_machine(),
    )
    try:
        history = fit_with(
            model, dataset.x, dataset.y, settings.fit_options(), validation=(dataset.test_x, dataset.test_y),
            checkpoint=folder.checkpoint, resume=resumed, progress=progress, on_epoch=folder.add_epoch,
        )  # fmt: skip
    except KeyboardInterrupt:
        folder.save_model(model)
        folder.describe(status="interrupted")
        _say("stopped", f"saved; go on with: onelaunch train --resume {folder.path}")
        raise
    except DivergedError as error:
        folder.describe(status=str(error))
        raise
    folder.finish(model, history)
    folder.describe(
        status="finished", engine=history.engine, reason=history.reason, precision=history.precision, plan=history.plan,
        allocations=history.allocations, seconds=history.seconds, startup_seconds=history.startup_seconds,
    )  # fmt: skip
    _say("engine", history.reason)
    _say("result", f"{summary(history.epochs[-1])}, in {history.seconds:.3g} s")
    _say("curves", str(folder.path / CURVES))
    _say("run", str(folder.path))


def _name(settings: TrainConfig) -> str:
    return Path(settings.data).stem


def _say(what: str, text: str) -> None:
    typer.echo(f"{what:<8} {text}")
