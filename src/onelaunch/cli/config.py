"""The configuration of `onelaunch train`: flat TOML keys, each also a flag; flags win."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from onelaunch.activations import ACTIVATIONS
from onelaunch.data import NAMES
from onelaunch.errors import OnelaunchError, reason_of, suggest
from onelaunch.files import read_text
from onelaunch.optimizers import OPTIMIZERS
from onelaunch.run.spec import Spec
from onelaunch.train.mlp import check_architecture


def one_of(names: Iterable[str]) -> str:
    """`a, b or c`"""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def takers(argument: str) -> str:
    """The optimizers that read `argument`, for help texts."""
    return one_of(entry.name for entry in OPTIMIZERS.values() if argument in entry.arguments)


DECOUPLED = one_of(entry.name for entry in OPTIMIZERS.values() if entry.decoupled_decay)
IMAGES = ("mnist", "fashion-mnist")  # which lie in a folder


class TrainConfig(BaseModel):
    """The defaults reach 98 % on the full MNIST; `configs/default.toml` spells them out."""

    model_config = ConfigDict(extra="forbid", strict=True)

    data: str = Field("mnist", description="mnist, fashion-mnist, digits, or a .csv, .npz or .npy file")
    data_dir: str | None = Field(None, description="folder that holds the four MNIST or Fashion-MNIST files")
    target: str | None = Field(None, description="column or array of the file that holds the targets")
    validation: float = Field(0.2, description="share of the rows held out, for data with no test set of its own")
    layers: list[int] | None = Field(None, description="all widths, such as 784,128,10; or give --hidden")
    hidden: list[int] = Field([512, 512], description="hidden widths, such as 128,128; the rest comes from the data")
    activation: str = Field("relu", description=one_of(ACTIVATIONS))
    dropout: float = Field(0.2, description="probability to drop a hidden unit")
    batch_norm: bool = Field(False, description="normalise before each activation")
    epochs: int | None = Field(8, description="passes over the data; or give --steps")
    steps: int | None = Field(None, description="number of batches, instead of --epochs")
    batch_size: int = Field(128, description="rows a step")
    optimizer: str = Field("adam", description=one_of(OPTIMIZERS))
    lr: float = Field(1e-3, description="learning rate (its peak, for schedules)")
    momentum: float = Field(0.0, description=f"of {takers('momentum')}")
    nesterov: bool = Field(False, description=f"Nesterov momentum, of {takers('nesterov')}")
    weight_decay: float = Field(0.0, description=f"decoupled decay ({DECOUPLED}), or an L2 penalty (the others)")
    betas: list[float] | None = Field(None, description=f"of {takers('betas')}; default: the optimizer's own")
    eps: float = Field(1e-8, description=f"of {takers('eps')}")
    schedule: str = Field("one_cycle", description="constant, linear, cosine or one_cycle")
    loss: str = Field("cross_entropy", description="cross_entropy, mse or bce_with_logits")
    label_smoothing: float = Field(0.0, description="share of the target spread over all classes")
    drop_last: bool = Field(False, description="leave out a last batch that is not full")
    precision: str = Field("auto", description="auto, fp32, tf32, bf16 or fp16")
    engine: str = Field("auto", description="auto, resident, graph, cpu or eager; compare: of ours only this one")
    memory: str = Field("plan", description="plan, caching or stream, for kernels on a GPU")
    seed: int = Field(0, description="of the weights, the row order and the dropout masks")
    out: str | None = Field(None, description="folder for the run; a new one under runs/ when not given")

    def fit_options(self) -> dict[str, Any]:
        """The arguments of `fit` that describe the run."""
        options = {name: getattr(self, name) for name in Spec.__dataclass_fields__ if name != "rows"}
        return {**options, "betas": None if self.betas is None else tuple(self.betas)}

    def to_toml(self) -> str:
        """All that describes the run, but not where it went; relative paths made absolute, so that it runs from anywhere."""
        values = self.model_dump(
            exclude_none=True, exclude={"out"} | ({"hidden"} if self.layers is not None else set())
        )
        for key in ("data", "data_dir"):
            named = key == "data" and not Path(values[key]).suffix  # "mnist" stays, even beside a folder of that name
            if key in values and not named and Path(values[key]).exists():
                values[key] = str(Path(values[key]).resolve())
        # A path may hold what UTF-8 has no bytes for: better such a config than none.
        return tomli_w.dumps(values).encode("utf-8", "replace").decode("utf-8")


def read_config(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_text(path))
    except OSError as error:
        hint = f"for that data pass --data {path}" if str(path) in NAMES else "pass a TOML file, or leave it out"
        raise OnelaunchError(f"config {str(path)!r} cannot be read: {reason_of(error)}; {hint}") from error
    except (ValueError, RecursionError) as error:  # besides its own, tomllib lets some of Python's through
        remedy = "write lines such as lr = 0.01"
        raise OnelaunchError(f"config {str(path)!r} is not TOML: {str(error).splitlines()[0]}; {remedy}") from error


def make_config(from_file: dict[str, Any], flags: dict[str, Any]) -> TrainConfig:
    """Flags over file over defaults, checked. Giving steps (or layers) sets aside the default epochs (or hidden)."""
    given = {**from_file, **flags}
    for one, other in (("epochs", "steps"), ("layers", "hidden")):
        if one in given and other in given:
            if (one in flags) == (other in flags):
                raise OnelaunchError(f"{one} and {other} are both given: pass one of the two")
            given.pop(other if one in flags else one)
    if "steps" in given:
        given["epochs"] = None
    try:
        config = TrainConfig(**given)
    except ValidationError as error:
        raise OnelaunchError(_one_line(error, given)) from None
    Spec(rows=max(1, config.batch_size), **config.fit_options())  # every option checked before any data is read
    if any(width < 1 for width in config.hidden):
        raise OnelaunchError(f"hidden={config.hidden} must be widths of 1 or more, such as 128,128")
    check_architecture(config.layers if config.layers is not None else [1, 1], config.activation, config.dropout)
    if not 0 < config.validation < 1:
        raise OnelaunchError(f"validation={config.validation} must be a share between 0 and 1, such as 0.2")
    if config.out == "":
        raise OnelaunchError("out='' names no folder: pass one, or leave it out for a new one under runs/")
    if config.data_dir is not None and config.data not in IMAGES:
        known = " or ".join(IMAGES)
        raise OnelaunchError(f"data_dir={config.data_dir!r} is for {known}, not for data={config.data!r}: leave it out")
    return config


def _one_line(error: ValidationError, given: dict[str, Any]) -> str:
    first = error.errors()[0]
    key = str(first["loc"][0])
    if first["type"] == "extra_forbidden":
        return (
            f"config key {key!r} is not known{suggest(key, TrainConfig.model_fields) or ': see onelaunch train --help'}"
        )
    expected = TrainConfig.model_fields[key].annotation
    kind = expected.__name__ if isinstance(expected, type) else str(expected)  # list[int] is no type
    return f"{key}={given[key]!r} has the wrong type: {first['msg'].lower()} (expected {kind.replace(' | None', '')})"
