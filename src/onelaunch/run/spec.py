"""The description of a run: every argument of `fit` that shapes it, checked, and the arithmetic that follows from them.

A Spec is pure data. All engines read the same one and a checkpoint stores it. Two runs with equal Specs, models and data are
the same run.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onelaunch.errors import ArgumentTypeError, OnelaunchError, abbreviate, require_integer, require_option
from onelaunch.optimizers import OPTIMIZERS
from onelaunch.run.early_stopping import EarlyStopping, make_early_stopping
from onelaunch.run.metric_names import CLASS_METRICS, VALUE_METRICS, require_metric
from onelaunch.run.options import CUSTOM_LOSS, ENGINES, LOSSES, MEMORY, OWN_BETAS, PRECISIONS, Options
from onelaunch.run.schedule import SCHEDULES, learning_rate

MAX_FLOAT32 = 3.4028234663852886e38
MAX_STEPS = 2**32 - 1  # a step is one 32-bit word of the dropout counter


@dataclass(frozen=True, kw_only=True)
class Spec(Options):
    """The options of a run, checked, and the number of its training rows."""

    rows: int
    betas: tuple[float, float] = OWN_BETAS
    # One weight per class is for Python alone: config files and flags name the classes.
    class_weight: str | dict[Any, float] | tuple[float, ...] | None = None  # type: ignore[assignment]
    metrics: tuple[str, ...] = ()
    early_stopping: EarlyStopping | None = None

    def __post_init__(self) -> None:
        for argument, options in (
            ("optimizer", OPTIMIZERS), ("schedule", SCHEDULES), ("loss", LOSSES), ("precision", PRECISIONS),
            ("engine", ENGINES), ("memory", MEMORY),
        ):  # fmt: skip
            if argument != "loss" or self.loss != CUSTOM_LOSS:
                require_option(argument, getattr(self, argument), options)
        if self.betas is OWN_BETAS:
            object.__setattr__(self, "betas", OPTIMIZERS[self.optimizer].default_betas)
        from onelaunch.rng import check_seed  # imports torch, which help texts must not wait for

        object.__setattr__(self, "seed", check_seed(self.seed))
        _check_counts(self)
        _check_floats(self)
        for argument in ("momentum", "nesterov"):
            takers = [entry.name for entry in OPTIMIZERS.values() if argument in entry.arguments]
            if getattr(self, argument) and self.optimizer not in takers:
                raise OnelaunchError(
                    f"{argument}={getattr(self, argument)} belongs to optimizer={' or '.join(map(repr, takers))}: "
                    f"leave it out, {self.optimizer!r} does not take it"
                )
        if self.nesterov and not self.momentum:
            raise OnelaunchError("nesterov=True needs momentum: pass momentum=0.9, or nesterov=False")
        if self.label_smoothing and self.loss != "cross_entropy":
            raise OnelaunchError(
                f"label_smoothing={self.label_smoothing} needs loss='cross_entropy' (got {self.loss!r})"
            )
        object.__setattr__(self, "class_weight", _class_weight(self.class_weight, self.loss))
        object.__setattr__(self, "metrics", _metrics(self.metrics, self.loss))
        object.__setattr__(self, "early_stopping", make_early_stopping(self.early_stopping))
        followed = self.early_stopping.metric if self.early_stopping else "loss"
        if followed == "accuracy" and self.loss in ("mse", CUSTOM_LOSS):
            raise OnelaunchError(f"early_stopping.metric='accuracy' has no meaning for loss={self.loss!r}: pass 'loss'")
        if followed not in ("loss", "accuracy"):
            _metrics((followed,), self.loss)
        if self.steps_per_epoch == 0:
            raise OnelaunchError(
                f"batch_size={self.batch_size} with drop_last=True leaves no batch in {self.rows} rows: "
                "pass a smaller batch_size, or drop_last=False"
            )
        if self.total_steps > MAX_STEPS:
            raise OnelaunchError(f"a run of {self.total_steps} steps is too long: at most 2**32 - 1 are counted")

    @property
    def compiled_precision(self) -> str:
        """`precision` on the engines with their own kernels, where "auto" means tf32 or better."""
        return "tf32" if self.precision == "auto" else self.precision

    @property
    def steps_per_epoch(self) -> int:
        whole, rest = divmod(self.rows, self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    @property
    def total_steps(self) -> int:
        return self.steps if self.steps is not None else (self.epochs or 0) * self.steps_per_epoch

    def epoch_of(self, step: int) -> int:
        return step // self.steps_per_epoch

    def epoch_end(self, step: int) -> int:
        """The step after the last one of `step`'s epoch, within the run."""
        return min((self.epoch_of(step) + 1) * self.steps_per_epoch, self.total_steps)

    def batch_slice(self, step: int) -> slice:
        """The entries of `permutation(rows, seed, epoch_of(step))` that are the rows of this step."""
        first = step % self.steps_per_epoch * self.batch_size
        return slice(first, min(first + self.batch_size, self.rows))

    def rows_of(self, step: int) -> int:
        part = self.batch_slice(step)
        return part.stop - part.start

    def lr_at(self, step: int) -> float:
        return learning_rate(self.schedule, self.lr, step, self.total_steps)

    def to_dict(self) -> dict[str, Any]:
        """The fields in a form that JSON keeps as it is; `Spec(**spec.to_dict()) == spec`."""
        weight: Any = self.class_weight
        if isinstance(weight, dict):
            weight = {str(label): value for label, value in weight.items()}
        return {
            **dataclasses.asdict(self), "betas": list(self.betas), "metrics": list(self.metrics),
            "class_weight": list(weight) if isinstance(weight, tuple) else weight,
        }  # fmt: skip

    @property
    def all_metrics(self) -> tuple[str, ...]:
        """`metrics`, and the one that early stopping follows if an engine does not compute it anyway."""
        followed = self.early_stopping.metric if self.early_stopping else "loss"
        return self.metrics if followed in ("loss", "accuracy", *self.metrics) else (*self.metrics, followed)


def _check_counts(spec: Spec) -> None:
    for argument in ("rows", "epochs", "steps", "batch_size"):
        value = getattr(spec, argument)
        if value is None and argument in ("epochs", "steps"):
            continue
        number = require_integer(argument, value, "a whole number, 1 or more")
        if number < 1:
            raise OnelaunchError(f"{argument}={number} must be 1 or more")
        object.__setattr__(spec, argument, number)
    if (spec.epochs is None) == (spec.steps is None):
        given = "both" if spec.epochs else "neither"
        raise OnelaunchError(f"pass epochs= or steps=, one of the two (got {given}); for example epochs=10")


def _check_floats(spec: Spec) -> None:
    betas = spec.betas
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise ArgumentTypeError(
            f"betas={betas!r} must be two numbers, such as (0.9, 0.999); rmsprop's alpha is the second"
        )
    bounds = {
        "lr": MAX_FLOAT32, "momentum": 1, "weight_decay": MAX_FLOAT32, "eps": MAX_FLOAT32,
        "label_smoothing": math.nextafter(1, 2),
    }  # fmt: skip
    for argument, bound in bounds.items():
        object.__setattr__(spec, argument, _number(argument, getattr(spec, argument), bound))
    if spec.clip_norm is not None:
        clip_norm = _number("clip_norm", spec.clip_norm, MAX_FLOAT32)
        if not clip_norm:
            raise OnelaunchError("clip_norm=0 would remove every gradient: pass a number above 0, or None")
        object.__setattr__(spec, "clip_norm", clip_norm)
    checked = tuple(_number(f"betas[{i}]", beta, 1) for i, beta in enumerate(betas))
    object.__setattr__(spec, "betas", checked)
    for argument in ("nesterov", "drop_last"):
        if not isinstance(getattr(spec, argument), bool):
            raise ArgumentTypeError(f"{argument}={getattr(spec, argument)!r} must be True or False")


def _number(argument: str, value: object, bound: float) -> float:
    """`value` as a float in [0, bound)."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ArgumentTypeError(f"{argument}={abbreviate(value)} is not a number")
    if not 0 <= value < bound:  # type: ignore[operator]
        limit = {MAX_FLOAT32: ", that float32 can hold", 1: " and below 1"}.get(bound, " and at most 1")
        raise OnelaunchError(f"{argument}={value!s:.40} must be a finite number, 0 or more{limit}")
    return float(value)


def _class_weight(weight: Any, loss: str) -> str | dict[Any, float] | tuple[float, ...] | None:
    """`weight` as "balanced", as {class: weight} or (weight, …) with float weights, or as None."""
    if weight is None:
        return None
    if loss == CUSTOM_LOSS:
        raise OnelaunchError("class_weight does not go with a loss function of your own: weigh the rows inside it")
    if loss == "mse":
        raise OnelaunchError("class_weight needs classes, which loss='mse' has not: pass sample_weight instead")
    if isinstance(weight, str):
        require_option("class_weight", weight, ("balanced",), or_else="a dict such as {0: 1.0, 1: 5.0}")
        return weight
    by_class = isinstance(weight, Mapping)
    if not by_class:  # one per class, as PyTorch's `weight`
        if not (hasattr(weight, "__len__") and hasattr(weight, "__getitem__")) or getattr(weight, "ndim", 1) != 1:
            raise ArgumentTypeError(
                f"class_weight={abbreviate(weight)} is not known: pass 'balanced' or {{0: 1.0, 1: 5.0}}"
            )
        weight = dict(enumerate(weight))
    if not weight:
        raise OnelaunchError("class_weight is empty: pass the weight of a class, such as {1: 5.0}, or None")
    checked = {}
    for label, value in weight.items():
        number = value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else value
        checked[label.item() if hasattr(label, "item") else label] = _number(
            f"class_weight[{label!r:.40}]", number, MAX_FLOAT32
        )
    if not any(checked.values()):
        raise OnelaunchError("class_weight is 0 for every class it names: give at least one of them a weight")
    return checked if by_class else tuple(checked.values())


def _metrics(metrics: Any, loss: str) -> tuple[str, ...]:
    if isinstance(metrics, str) or not hasattr(metrics, "__iter__"):
        raise ArgumentTypeError(f"metrics={metrics!r:.60} is not a tuple: pass for example metrics=('f1', 'roc_auc')")
    known, other = (VALUE_METRICS, CLASS_METRICS) if loss == "mse" else (CLASS_METRICS, VALUE_METRICS)
    for name in (names := tuple(metrics)):
        if loss == CUSTOM_LOSS:
            raise OnelaunchError(
                f"metrics={name!r} needs a named loss, to know what the outputs mean: compute it in a callback"
            )
        if name in ("loss", "accuracy"):
            raise OnelaunchError(f"metrics={name!r} is always computed where it has a meaning: leave it out")
        if name in other:
            kind = "classes" if loss == "mse" else "values to regress"
            raise OnelaunchError(
                f"metrics={name!r} is for {kind}, not for loss={loss!r}: pass one of {', '.join(known)}"
            )
        require_metric("metrics", name, known)
    return names
