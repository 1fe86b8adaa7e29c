"""PyTorch's optimizers for the eager engine, and their state in the form all engines share."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from onelaunch.train.engines.contract import Run, State

STATE_NAMES = {"momentum": "momentum_buffer", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}  # ours: torch.optim's


def make_optimizer(run: Run, parameters: list[torch.nn.Parameter], lr: torch.Tensor) -> torch.optim.Optimizer:
    """PyTorch's own. On CUDA its fused form, which reads the learning rate from the device: a step can then be captured."""
    spec = run.spec
    cuda = run.device.type == "cuda"
    rate = lr if cuda else spec.lr
    if spec.optimizer == "sgd":
        return torch.optim.SGD(
            parameters, lr=rate, momentum=spec.momentum, nesterov=spec.nesterov, weight_decay=spec.weight_decay,
            fused=cuda,
        )  # fmt: skip
    kind = torch.optim.Adam if spec.optimizer == "adam" else torch.optim.AdamW
    return kind(
        parameters, lr=rate, betas=spec.betas, eps=spec.eps, weight_decay=spec.weight_decay, fused=cuda, capturable=cuda
    )


def optimizer_state(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> State:
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
    for name, parameter in parameters.items():
        found = {
            theirs: state[f"{ours}.{name}"].to(parameter).clone()
            for ours, theirs in STATE_NAMES.items()
            if f"{ours}.{name}" in state
        }
        if found:
            if f"engine.step.{name}" in state:
                found["step"] = state[f"engine.step.{name}"].to(device).clone()
            optimizer.state[parameter].update(found)


def count_steps_from(optimizer: torch.optim.Optimizer, first_step: int, device: torch.device) -> None:
    """Adam's own count of steps, which a checkpoint of another engine has not: on a GPU too, since a captured step counts
    there."""
    for kept in optimizer.state.values():
        if "exp_avg" in kept:
            kept.setdefault("step", torch.tensor(float(first_step), device=device))
