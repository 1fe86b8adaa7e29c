"""Whether networks fit into memory, asked before they are made: Linux ends a process that takes more than there is."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from onelaunch.errors import OnelaunchError
from onelaunch.format import format_bytes
from onelaunch.operating_system import free_memory
from onelaunch.optimizers import OPTIMIZERS
from onelaunch.run.spec import Spec

PARAMETER_BYTES = 4  # float32
MIN_CHECKED_BYTES = 2**28  # what takes less is made without asking
SAVED_COPIES = 2  # safetensors 0.8 makes them: 573 MiB of tensors took 1,146 MiB more to save
MAX_NAMED_COUNT = 10**15  # larger numbers are not spelled out


def parameters_of(widths: Sequence[int]) -> int:
    """The number of weights and biases of the Linear layers between these widths."""
    return sum((inputs + 1) * outputs for inputs, outputs in pairwise(widths))


def training_copies(optimizer: str, momentum: float = 0.0) -> int:
    """Values per parameter that training on a CPU keeps at least: weight, gradient and the optimizer's state."""
    return 2 + len(OPTIMIZERS[optimizer].state_names(momentum))


def no_room_reason(parameters: int, copies: int = 1) -> str:
    """Why `parameters` of float32, with this many values per parameter, do not fit into host memory; empty if they may."""
    needed = PARAMETER_BYTES * copies * parameters
    free = free_memory() if needed > MIN_CHECKED_BYTES else None
    if free is None or needed <= free:
        return ""
    known = parameters < MAX_NAMED_COUNT
    count = f"{parameters:,}" if known else "more than 10**15"
    size = format_bytes(needed) if known else f"over {format_bytes(PARAMETER_BYTES * copies * MAX_NAMED_COUNT)}"
    return f"{count} parameters take {size}, {format_bytes(free)} are free"


def check_room_to_train(parameters: int, spec: Spec) -> None:
    """Raise OnelaunchError if gradients and optimizer state of a model that is there do not fit into host memory."""
    reason = no_room_reason(parameters, training_copies(spec.optimizer, spec.momentum) - 1)
    if reason:
        raise OnelaunchError(
            f"model is too large to train here with optimizer={spec.optimizer!r}: gradient and state of its {reason}: "
            "pass a smaller model"
        )


def check_room_to_save(parameters: int, spec: Spec, *, trains_here: bool) -> None:
    """Raise OnelaunchError if writing a checkpoint, which makes copies of weights and state, does not fit into host memory.

    trains_here: on the CPU, beside gradient and state.
    """
    states = training_copies(spec.optimizer, spec.momentum) - 2
    reason = no_room_reason(parameters, SAVED_COPIES * (1 + states) + (1 + states if trains_here else 0))
    if reason:
        raise OnelaunchError(
            f"model is too large for checkpoints here: with them, its {reason}: pass a smaller model, or checkpoint=None"
        )
