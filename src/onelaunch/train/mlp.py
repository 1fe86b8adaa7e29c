"""The MLP of a config, as an ordinary nn.Sequential."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from torch import nn

from onelaunch.activations import ACTIVATIONS
from onelaunch.errors import OnelaunchError, abbreviate, require_option
from onelaunch.run.generators import seeded
from onelaunch.train.memory import no_room_reason, parameters_of


def check_architecture(widths: Sequence[int], activation: str | None, dropout: float) -> None:
    """Raise OnelaunchError unless `mlp` can build a network of these widths."""
    if activation is not None:
        require_option("activation", activation, ACTIVATIONS)
    if len(widths) < 2 or any(width < 1 for width in widths):
        raise OnelaunchError(f"layers={list(widths)} must be two or more widths, each 1 or more, such as 784,128,10")
    if not 0 <= dropout <= 1:
        raise OnelaunchError(f"dropout={dropout} must be between 0 and 1")


def mlp(
    widths: Sequence[int], *, activation: str | None = "relu", dropout: float = 0.0, batch_norm: bool = False,
    layer_norm: bool = False, seed: int = 0,
) -> nn.Sequential:  # fmt: skip
    """Flatten, then Linear [→ BatchNorm1d or LayerNorm] [→ activation] [→ Dropout] for each hidden width, then Linear.

    The weights are PyTorch's defaults, drawn with `seed`; the state of PyTorch's global generator does not change.
    """
    check_architecture(widths, activation, dropout)
    if reason := no_room_reason(parameters_of(widths)):
        raise _too_large(widths, f" ({reason})")
    with seeded(seed):
        try:
            return nn.Sequential(nn.Flatten(), *_layers(widths, activation, dropout, batch_norm, layer_norm))
        except (RuntimeError, MemoryError, TypeError, OverflowError) as error:  # the last two: beyond PyTorch's sizes
            raise _too_large(widths) from error


def _too_large(widths: Sequence[int], reason: str = "") -> OnelaunchError:
    given = abbreviate(list(widths), 120)
    return OnelaunchError(f"layers={given} do not fit into memory{reason}: pass smaller widths in hidden, or in layers")


def _layers(
    widths: Sequence[int], activation: str | None, dropout: float, batch_norm: bool, layer_norm: bool
) -> Iterator[nn.Module]:
    for inputs, outputs in pairwise(widths[:-1]):
        yield nn.Linear(inputs, outputs)
        if batch_norm:
            yield nn.BatchNorm1d(outputs)
        if layer_norm:
            yield nn.LayerNorm(outputs)
        if activation is not None:
            yield ACTIVATIONS[activation].make_module()
        if dropout:
            yield nn.Dropout(dropout)
    yield nn.Linear(widths[-2], widths[-1])
