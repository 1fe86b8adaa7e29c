"""PyTorch's optimizers for the eager engine, and the conversion of their state to the form that all engines share."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from onelaunch.engines.contract import Run, State
from onelaunch.optimizers import OPTIMIZERS, TORCH_STATE_NAMES
from onelaunch.step.capturable_optimizer import begin_momentum

OUR_NAMES = sorted({name for entry in OPTIMIZERS.values() for name in entry.state_names(momentum=1.0)})
STATE_NAMES = {name: TORCH_STATE_NAMES.get(name, name) for name in OUR_NAMES}  # our name: that of torch.optim


def make_optimizer(run: Run, parameters: list[torch.nn.Parameter], lr: torch.Tensor) -> torch.optim.Optimizer:
    """The PyTorch optimizer of the run. On CUDA it reads the learning rate from the device, so that a step can be captured."""
    cuda = run.device.type == "cuda"
    return OPTIMIZERS[run.spec.optimizer].make(parameters, run.spec, lr if cuda else run.spec.lr, cuda)


def optimizer_state(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> State:
    """The optimizer's state by the names of `engines/contract.py`."""
    state: State = {}
    for name, parameter in parameters.items():
        kept = optimizer.state.get(parameter, {})
        for ours, theirs in STATE_NAMES.items():
            if kept.get(theirs) is not None:
                state[f"{ours}.{name}"] = kept[theirs]
        if "step" in kept:
            state[f"engine.step.{name}"] = kept["step"]
    return state


def restore_optimizer(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], state: Mapping[str, torch.Tensor],
    device: torch.device,
) -> None:  # fmt: skip
    """Put `state` (of `optimizer_state`, or of another engine) into the optimizer."""
    for name, parameter in parameters.items():
        found = {
            theirs: torch.empty_like(parameter).copy_(state[f"{ours}.{name}"])  # in the layout of the parameter
            for ours, theirs in STATE_NAMES.items()
            if f"{ours}.{name}" in state
        }
        if found:
            if f"engine.step.{name}" in state:
                found["step"] = state[f"engine.step.{name}"].to(device).clone()
            optimizer.state[parameter].update(found)
    if state:
        begin_momentum(optimizer)  # of parameters that are new in the run


def set_step_counts(optimizer: torch.optim.Optimizer, step: int, device: torch.device) -> None:
    """Give restored states the optimizer's own step count, which a checkpoint of another engine lacks.

    The count is on the device, where a captured step increments it.
    """
    for kept in optimizer.state.values():
        if kept:
            kept.setdefault("step", torch.tensor(float(step), device=device))
