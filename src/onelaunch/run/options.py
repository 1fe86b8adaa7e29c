"""The options of a run with their types, defaults and help texts: `fit`, Spec and the command line derive from them.

Nothing here imports torch, so that help texts do not wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from onelaunch.optimizers import OPTIMIZERS
from onelaunch.run.metric_names import METRICS
from onelaunch.run.schedule import SCHEDULES

LOSSES = ("cross_entropy", "mse", "bce_with_logits")
PRECISIONS = ("auto", "fp32", "tf32", "bf16", "fp16")
ENGINES = ("auto", "resident", "graph", "compiled", "cpu", "eager")
CUSTOM_LOSS = "custom"  # what Spec says of a loss that is a function
MEMORY = ("plan", "caching", "stream")
OWN_BETAS: Any = None  # passed as `betas`: replaced by the default of the optimizer


def one_of(names: Iterable[str]) -> str:
    """`a, b or c`"""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last


def takers(argument: str) -> str:
    """The optimizers that read `argument`, for help texts."""
    return one_of(entry.name for entry in OPTIMIZERS.values() if argument in entry.arguments)


DECOUPLED = one_of(entry.name for entry in OPTIMIZERS.values() if entry.decoupled_decay)


def option(default: Any, help: str) -> Any:
    """A field with its help text."""
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata={"help": help})
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of `fit` that shape a run, as the user passes them; Spec checks them and brings them into one form."""

    epochs: int | None = option(None, "passes over the data; or give --steps")
    steps: int | None = option(None, "number of batches, instead of --epochs")
    batch_size: int = option(32, "rows per step")
    optimizer: str = option("adam", one_of(OPTIMIZERS))
    lr: float = option(1e-3, "learning rate (with a schedule, its peak)")
    momentum: float = option(0.0, f"momentum of {takers('momentum')}")
    nesterov: bool = option(False, f"Nesterov momentum, for {takers('nesterov')}")
    weight_decay: float = option(0.0, f"decoupled decay ({DECOUPLED}) or L2 penalty (the others)")
    betas: list[float] | tuple[float, float] | None = option(
        OWN_BETAS, f"decay rates of the running averages, for {takers('betas')}; default: the optimizer's own"
    )
    eps: float = option(1e-8, f"added to the denominator, for {takers('eps')}")
    schedule: str = option("constant", one_of(SCHEDULES))
    loss: str = option("cross_entropy", one_of(LOSSES))
    label_smoothing: float = option(0.0, "fraction of the target that is spread over all classes")
    class_weight: str | dict[Any, float] | None = option(
        None, "balanced, or the weight of each class in the loss: 0=1,1=5"
    )
    clip_norm: float | None = option(None, "largest global norm of the gradient; a longer one is scaled down")
    metrics: tuple[str, ...] | list[str] = option(
        (), f"computed on the validation rows after each epoch: {one_of(METRICS)}"
    )
    early_stopping: Any = option(None, "stop after this many epochs without a better validation loss; keep the best")
    drop_last: bool = option(False, "leave out a last batch that is not full")
    precision: str = option("auto", one_of(PRECISIONS))
    engine: str = option("auto", f"{one_of(ENGINES)}; in compare, the only engine of ours to run")
    memory: str = option("plan", f"{one_of(MEMORY)}, for kernels on a GPU")
    seed: int = option(0, "of the weights, the row order and the dropout masks")
