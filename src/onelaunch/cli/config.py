"""The configuration of `onelaunch train`: flat TOML keys, each of them also a flag; flags win.

`onelaunch train --help` lists the fields of `TrainConfig`: torch and pydantic are imported when a configuration is checked.
"""

from __future__ import annotations

import tomllib
from collections.abc import Container
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from onelaunch.activation_names import ACTIVATION_NAMES
from onelaunch.errors import OnelaunchError, reason_of, require_option, suggest
from onelaunch.files import read_text
from onelaunch.run import table_defaults
from onelaunch.run.options import LOSSES, Options, one_of, option
from onelaunch.run.schedule import SCHEDULES
from onelaunch.run.spec import Spec
from onelaunch.shipped import find_config
from onelaunch.table_names import TASKS, is_table_file

TASK_OF_LOSS = {"cross_entropy": "classification", "mse": "regression"}
TABLE_DEFAULTS: dict[str, Any] = {  # of tables, where the user does not say; None is decided by the number of rows
    "dropout": table_defaults.DROPOUT, "optimizer": table_defaults.OPTIMIZER, "lr": table_defaults.LR,
    "weight_decay": table_defaults.WEIGHT_DECAY, "betas": list(table_defaults.BETAS), "batch_size": None,
    "eps": table_defaults.EPS,
}  # fmt: skip
IMAGE_SETS = ("mnist", "fashion-mnist")  # data that may come from a folder


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Options):
    """The defaults reach 98 % on the full MNIST; `configs/default.toml` spells them out."""

    data: str = option("mnist", "mnist, fashion-mnist, digits, or a .csv, .tsv, .csv.gz, .parquet, .npz or .npy file")
    data_dir: str | None = option(None, "folder that holds the four MNIST or Fashion-MNIST files")
    target: str | None = option(None, "column or array of the file that holds the targets")
    task: str | None = option(None, f"of a table: {one_of(TASKS)}; inferred from its target when not given")
    categorical: tuple[str, ...] | list[str] = option((), "columns of a table whose numbers are names of categories")
    validation: float = option(0.2, "fraction of the rows held out, for data without a test set of its own")
    split_seed: int | None = option(None, "seed that chooses the rows held out; --seed when not given")
    stratify: bool = option(True, "of a table: each class gives its share of the rows held out")
    layers: list[int] | None = option(None, "all widths, such as 784,128,10; or give --hidden")
    hidden: list[int] = option([512, 512], "hidden widths, such as 128,128; the rest comes from the data")
    activation: str = option("relu", one_of(ACTIVATION_NAMES))
    dropout: float = option(0.2, "probability to drop a hidden unit")
    batch_norm: bool = option(False, "normalise before each activation")
    epochs: int | None = option(8, "passes over the data; or give --steps")
    batch_size: int | None = option(128, "rows per step")  # type: ignore[assignment]  # None until a table is read
    schedule: str = option("one_cycle", one_of(SCHEDULES))
    loss: str | None = option(None, f"{one_of(LOSSES)}; by the targets when not given")  # type: ignore[assignment]
    early_stopping: int | dict[str, Any] | None = option(
        None, "stop after this many epochs without a better validation loss; keep the best"
    )
    out: str | None = option(None, "folder for the run; a new one under runs/ when not given")

    @property
    def rows_seed(self) -> int:
        """The seed that chooses the rows held out."""
        return self.seed if self.split_seed is None else self.split_seed

    def fit_options(self) -> dict[str, Any]:
        """The arguments of `fit` that describe the run."""
        options = {name: getattr(self, name) for name in Options.__dataclass_fields__}
        return {**options, "betas": None if self.betas is None else tuple(self.betas)}

    def resolved(self, rows: int, has_classes: bool) -> TrainConfig:
        """The configuration with a loss, a batch size and a length, for data of this many training rows."""
        loss = self.loss or ("cross_entropy" if has_classes else "mse")
        batch_size = table_defaults.table_batch_size(rows) if self.batch_size is None else self.batch_size
        no_length = self.epochs is None and self.steps is None
        epochs = table_defaults.table_epochs(rows, max(1, batch_size)) if no_length else self.epochs
        return replace(self, loss=loss, batch_size=batch_size, epochs=epochs)

    def to_toml(self) -> str:
        """All keys that describe the run."""
        values = asdict(self)
        if self.layers is not None:
            del values["hidden"]
        return as_toml(values)


def as_toml(values: dict[str, Any]) -> str:
    """A config file with these keys but `out`, and without those that are None or (). Relative paths are made absolute, so that
    it runs from anywhere."""
    import tomli_w

    kept = {key: value for key, value in values.items() if value not in (None, ()) and key != "out"}
    for key in ("data", "data_dir"):
        # "mnist" stays, even beside a folder of that name.
        is_name = key == "data" and not Path(kept.get(key, "")).suffix
        if key in kept and not is_name and Path(kept[key]).exists():
            kept[key] = str(Path(kept[key]).resolve())
    # A path may hold bytes that UTF-8 cannot encode. A config with replaced characters is better than none.
    return tomli_w.dumps(kept).encode("utf-8", "replace").decode("utf-8")


def read_config(path: Path) -> dict[str, Any]:
    """The keys of a TOML file, or of the shipped configuration of that name; not checked yet."""
    try:
        return tomllib.loads(read_text(find_config(path)))
    except OSError as error:
        from onelaunch.data import NAMES

        hint = f"for that data pass --data {path}" if str(path) in NAMES else "pass a TOML file, or leave it out"
        raise OnelaunchError(f"config {str(path)!r} cannot be read: {reason_of(error)}; {hint}") from error
    except (ValueError, RecursionError) as error:  # tomllib lets some of Python's own errors through
        remedy = "write lines such as lr = 0.01"
        raise OnelaunchError(f"config {str(path)!r} is not TOML: {str(error).splitlines()[0]}; {remedy}") from error


def merge(from_file: dict[str, Any], flags: dict[str, Any]) -> dict[str, Any]:
    """Flags over file. `steps` as a flag replaces `epochs` of the file too, and so on."""
    given = {**from_file, **flags}
    for one, other in (("epochs", "steps"), ("layers", "hidden")):
        if one in given and other in given:
            if (one in flags) == (other in flags):
                raise OnelaunchError(f"{one} and {other} are both given: pass one of the two")
            given.pop(other if one in flags else one)
    return given


def make_config(from_file: dict[str, Any], flags: dict[str, Any]) -> TrainConfig:
    """Flags over file over defaults, checked. If `steps` (or `layers`) is given, the default `epochs` (or `hidden`) is not."""
    from onelaunch.train.mlp import check_architecture

    given = merge(from_file, flags)
    if "steps" in given:
        given["epochs"] = None
    is_table = isinstance(given.get("data"), str) and is_table_file(Path(given["data"]))
    if is_table:
        length = {} if "steps" in given else {"epochs": None}
        widths = {} if "layers" in given else {"hidden": list(table_defaults.HIDDEN)}
        given = TABLE_DEFAULTS | length | widths | given
    config = TrainConfig(**_check_types(given))
    trial = config.resolved(max(1, config.batch_size or 1), config.task != "regression")
    Spec(rows=max(1, trial.batch_size or 1), **trial.fit_options())  # checks every option before any data is read
    _check_table_options(config, is_table)
    if any(width < 1 for width in config.hidden):
        raise OnelaunchError(f"hidden={config.hidden} must be widths of 1 or more, such as 128,128")
    check_architecture(config.layers if config.layers is not None else [1, 1], config.activation, config.dropout)
    if not 0 < config.validation < 1:
        raise OnelaunchError(f"validation={config.validation} must be a fraction between 0 and 1, such as 0.2")
    if not 0 <= config.rows_seed < 2**64:
        raise OnelaunchError(f"split_seed={config.split_seed} must be between 0 and 2**64 - 1: pass a number such as 0")
    if config.out == "":
        raise OnelaunchError("out='' names no folder: pass one, or leave it out for a new one under runs/")
    if config.data_dir is not None and config.data not in IMAGE_SETS:
        known = " or ".join(IMAGE_SETS)
        raise OnelaunchError(f"data_dir={config.data_dir!r} is for {known}, not for data={config.data!r}: leave it out")
    return config


def _check_table_options(config: TrainConfig, is_table: bool) -> None:
    for name in ("task", "categorical"):
        if getattr(config, name) and not is_table:
            raise OnelaunchError(
                f"{name}={getattr(config, name)!r} is for tables, not for data={config.data!r}: leave it out"
            )
    if config.task is not None:
        require_option("task", config.task, TASKS)
    if is_table and config.loss == "bce_with_logits":
        raise OnelaunchError(
            "loss='bce_with_logits' is not for tables: leave it out, classes are learned by cross_entropy"
        )
    if config.task and config.loss and config.task != TASK_OF_LOSS[config.loss]:
        raise OnelaunchError(
            f"task={config.task!r} and loss={config.loss!r} contradict each other: pass one of the two"
        )


def is_grid(value: Any, annotation: Any) -> bool:
    """Whether a value of the file is a list of values, for a key of this type."""
    kinds = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    takes_list = any(get_origin(kind) in (list, tuple) for kind in kinds)
    return isinstance(value, list) and (not takes_list or any(isinstance(entry, list) for entry in value))


def known_as(name: str, options: Container[str]) -> str:
    """The option that has this name in another library, such as `lr` for `learning_rate`; empty when there is none."""
    from onelaunch.train.argument_names import ELSEWHERE

    here = ELSEWHERE.get(name, "").partition("=")[0]
    return here if here in options else ""


def _check_types(given: dict[str, Any]) -> dict[str, Any]:
    """The values of the keys, where whole numbers may stand for floats."""
    from pydantic import TypeAdapter, ValidationError

    types = get_type_hints(TrainConfig)
    checked = {}
    for key, value in given.items():
        if key not in types:
            hint = suggest(known_as(key, types) or key, types)
            raise OnelaunchError(f"config key {key!r} is not known{hint or ': see onelaunch train --help'}")
        try:
            checked[key] = TypeAdapter(types[key]).validate_python(value, strict=True)
        except ValidationError as error:
            kind = types[key].__name__ if isinstance(types[key], type) else str(types[key]).replace(" | None", "")
            reason = error.errors()[0]["msg"].lower()
            advice = "; lists of values to try are for `onelaunch sweep`" if is_grid(value, types[key]) else ""
            raise OnelaunchError(f"{key}={value!r} has the wrong type: {reason} (expected {kind}){advice}") from None
    return checked
