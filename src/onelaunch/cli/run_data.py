"""The data of a run: loaded as the configuration says, announced on the terminal, and recognised when the run resumes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from onelaunch.cli.config import TASK_OF_LOSS, TrainConfig
from onelaunch.cli.say import say
from onelaunch.data import NAMES, Dataset, load, split
from onelaunch.data.encoder import decimal_comma_note
from onelaunch.data.table_encoding import load_table
from onelaunch.data.table_file import decimal_comma
from onelaunch.data.table_values import Positions
from onelaunch.errors import OnelaunchError, abbreviate_list
from onelaunch.files import digest_of_file
from onelaunch.table_names import is_table_file

MAX_DEVIATION = 30.0  # standard deviation above which the usual learning rates no longer fit


def load_data(settings: TrainConfig) -> tuple[Dataset, TrainConfig]:
    """The data of the run with a test part, announced on the terminal, with notes on what may surprise; and the settings,
    completed by what the data says."""
    dataset = _load_table(settings) if is_table_file(Path(settings.data)) else _load_arrays(settings)
    say("data", dataset.source)
    dataset = replace(dataset, notes=tuple(_notes(dataset)))
    for note in dataset.notes:
        say("note", note)
    if dataset.encoding is not None:
        say("task", f"{dataset.encoding.target.task} of {dataset.encoding.target.name!r}")
    return dataset, settings.resolved(len(dataset.x), dataset.classes is not None)


def _notes(dataset: Dataset) -> Iterator[str]:
    if dataset.fallback:
        yield "this is a small stand-in: put the full set into a folder and pass --data-dir to train on it"
    if dataset.encoding is not None:
        yield from _table_notes(dataset)
    elif dataset.classes is not None and len(dataset.classes) > max(20, len(dataset.x) // 2):
        yield f"{len(dataset.classes):,} classes in {len(dataset.x):,} rows: to learn numbers pass --loss mse"
    for what, array in (("features", dataset.x), ("targets", dataset.y)):
        if array.dtype == np.float32 and (spread := float(array.std())) > MAX_DEVIATION:
            yield f"the {what} vary by {spread:.3g} and are not scaled here: near 1 a network learns faster"


def _table_notes(dataset: Dataset) -> Iterator[str]:
    yield from dataset.encoding.encoder.notes
    if text := decimal_comma(dataset.classes or ()):
        yield decimal_comma_note(dataset.encoding.target.name, text)
    if dataset.classes is not None and dataset.test_y is not None:
        counts = np.bincount(dataset.test_y, minlength=len(dataset.classes))
        if absent := [repr(name) for name, count in zip(dataset.classes, counts, strict=True) if not count]:
            what, it = ("class", "it") if len(absent) == 1 else ("the classes", "them")
            yield f"no row of {what} {abbreviate_list(absent)} is held out: the scores say nothing about {it}"


def _load_table(settings: TrainConfig) -> Dataset:
    task = settings.task or (TASK_OF_LOSS[settings.loss] if settings.loss else None)
    return load_table(
        Path(settings.data).expanduser(), target=settings.target, task=task, categorical=tuple(settings.categorical),
        fraction=settings.validation, seed=settings.rows_seed, stratify=settings.stratify,
    )  # fmt: skip


def _load_arrays(settings: TrainConfig) -> Dataset:
    values = None if settings.loss is None else settings.loss != "cross_entropy"
    dataset = load(settings.data, data_dir=settings.data_dir, target=settings.target, values=values)
    return dataset if dataset.test_x is not None else split(dataset, settings.validation, settings.rows_seed)


def options_of(settings: TrainConfig, dataset: Dataset) -> dict[str, Any]:
    """The arguments of `fit` that describe the run, with classes by their numbers."""
    return {**settings.fit_options(), "class_weight": weight_by_number(settings.class_weight, dataset)}


def weight_by_number(weight: Any, dataset: Dataset) -> Any:
    """`class_weight` with the numbers of classes for their names; as it is where it names none."""
    if not isinstance(weight, dict) or dataset.classes is None:
        return weight
    positions = Positions(dataset.classes)
    for label in weight:
        if positions[str(label)] < 0:
            known = abbreviate_list(dataset.classes)
            raise OnelaunchError(
                f"class_weight names {str(label)!r}, which is not a class of {dataset.name}: it has {known}"
            )
    return {positions[str(label)]: value for label, value in weight.items()}


def data_digest(settings: TrainConfig) -> str | None:
    """The digest of the data file; None for a data set that has a name, and for a file that is gone."""
    path = Path(settings.data).expanduser()
    return digest_of_file(path) if settings.data not in NAMES and path.is_file() else None
