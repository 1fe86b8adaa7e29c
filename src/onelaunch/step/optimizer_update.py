"""The step of `torch.optim.Adam`, `AdamW` and `SGD` in a recording: one launch of our kernel per group of parameters.

The optimizer's own step runs first and creates its state; the recording then updates that state in place. The addresses of
gradients are known only once the step is recorded, so the tables are filled after it, before the first replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import SGD, AdamW, Optimizer

from onelaunch.integers import ceil_div
from onelaunch.kernels import optimizers as kernels
from onelaunch.kernels.launch import compiling
from onelaunch.step.accumulation import StepCounter
from onelaunch.step.capturable_optimizer import RULES, begin_momentum, settings_on_device

MAX_ELEMENTS = 2**31 - kernels.CHUNK  # of one tensor: a kernel counts them in 32 bits
ALIGNMENT = 16


class OptimizerUpdate:
    """Updates the parameters of `optimizer`, with these tensors on the device for each group: its learning rate, which is 0-d,
    and its `settings_on_device`.
    """

    def __init__(self, optimizer: Optimizer, rates: Sequence[torch.Tensor], settings: Sequence[torch.Tensor]) -> None:
        self.groups = [_Group(optimizer, *each) for each in zip(optimizer.param_groups, rates, settings, strict=True)]

    def launch(self) -> None:
        """Update the parameters, as far as they have a gradient; in a recording the tables are filled after it.

        Elsewhere they are filled first. Both compute the same bits.
        """
        recording = torch.cuda.is_current_stream_capturing()
        for group in self.groups:
            group.collect()
            if not recording:
                group.fill_tables()
            group.launch()

    def fill_tables(self) -> None:
        """Write the addresses that a recorded `launch` found to the device."""
        for group in self.groups:
            group.fill_tables()


class _Group:
    def __init__(self, optimizer: Optimizer, group: dict[str, Any], rate: torch.Tensor, settings: torch.Tensor) -> None:
        self.optimizer, self.group, self.rate, self.settings = optimizer, group, rate, settings
        self.rule, self.state_names = RULES[type(optimizer)].name, _state_names(optimizer, group)
        if self.rule == "adam":
            decoupled = bool(group.get("decoupled_weight_decay", isinstance(optimizer, AdamW)))
            self.options: tuple[bool, ...] = (decoupled, group["maximize"])
        else:
            self.options = (bool(self.state_names), group["nesterov"], group["maximize"])
        device, parameters = rate.device, group["params"]
        self.dtype = parameters[0].dtype
        self.addresses = torch.empty(len(parameters), kernels.COLUMNS, dtype=torch.int64, device=device)
        programs = sum(ceil_div(parameter.numel(), kernels.CHUNK) for parameter in parameters)
        self.chunks = torch.empty(programs, 2, dtype=torch.int32, device=device)
        self.rows: list[list[int]] = []
        self.counts: list[int] = []
        self.steps: list[torch.Tensor] = []
        self.copies: list[torch.Tensor] = []  # alive while the recording is
        with compiling():  # before a recording
            self._launch(1)

    def collect(self) -> None:
        updated = [parameter for parameter in self.group["params"] if parameter.grad is not None]
        states = [[self.optimizer.state[parameter][name] for name in self.state_names] for parameter in updated]
        self.steps = [state[self.state_names.index("step")] for state in states if "step" in self.state_names]
        gradients = [_as_laid_out(parameter) for parameter in updated]
        self.copies = [one for one, parameter in zip(gradients, updated, strict=True) if one is not parameter.grad]
        self.rows = []
        for parameter, gradient, state in zip(updated, gradients, states, strict=True):
            row = [parameter.numel(), *(tensor.data_ptr() for tensor in (parameter, gradient, *state))]
            self.rows.append(row + [0] * (kernels.COLUMNS - len(row)))
        self.counts = [ceil_div(parameter.numel(), kernels.CHUNK) for parameter in updated]

    def launch(self) -> None:
        if self.steps:
            torch._foreach_add_(self.steps, 1)
        self._launch(sum(self.counts))

    def _launch(self, programs: int) -> None:
        kernels.update(
            self.rule, self.options, self.addresses, self.chunks, self.settings, self.rate, programs, self.dtype
        )

    def fill_tables(self) -> None:
        if self.rows:
            self.addresses[: len(self.rows)].copy_(torch.tensor(self.rows))
            chunks = [[row, chunk] for row, count in enumerate(self.counts) for chunk in range(count)]
            self.chunks[: len(chunks)].copy_(torch.tensor(chunks, dtype=torch.int32))


def create_state(optimizer: Optimizer) -> None:
    """The state that the optimizer's first step would create, where there is none: so that our update can be the first."""
    if type(optimizer) is SGD:
        begin_momentum(optimizer)
    elif type(optimizer) in RULES:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if not optimizer.state[parameter]:
                    count = torch.zeros((), dtype=torch.float32, device=parameter.device)
                    moments = [name for name in _state_names(optimizer, group) if name != "step"]
                    state = {name: torch.zeros_like(parameter) for name in moments}
                    optimizer.state[parameter].update({"step": count, **state})


def optimizer_update(
    optimizer: Optimizer, rates: Sequence[torch.Tensor], settings: Sequence[torch.Tensor],
    scaler: torch.amp.GradScaler | None,
) -> OptimizerUpdate | None:  # fmt: skip
    """The update for this optimizer; None where its own step must be recorded: another class, option, type or layout."""
    after = optimizer._optimizer_step_post_hooks.values()
    hooks = [*optimizer._optimizer_step_pre_hooks.values(), *(one for one in after if not isinstance(one, StepCounter))]
    if type(optimizer) not in RULES or scaler is not None or hooks:
        return None
    for group in optimizer.param_groups:
        if group.get("amsgrad") or group["differentiable"] or not group["params"]:
            return None
        names = _state_names(optimizer, group)
        if not settings_on_device(optimizer, group) or not all(
            _fits(one, optimizer.state.get(one, {}), group["params"][0], names) for one in group["params"]
        ):
            return None
    return OptimizerUpdate(optimizer, rates, settings)


def _state_names(optimizer: Optimizer, group: dict[str, Any]) -> tuple[str, ...]:
    has_none = type(optimizer) is SGD and not group["momentum"]
    return () if has_none else kernels.STATE[RULES[type(optimizer)].name]


def _as_laid_out(parameter: torch.Tensor) -> torch.Tensor:
    """The parameter's gradient with its strides and alignment: as it is, or a copy. It stays where recordings add to it."""
    gradient = parameter.grad
    assert gradient is not None
    if gradient.stride() != parameter.stride() or gradient.data_ptr() % ALIGNMENT:
        return torch.empty_like(parameter).copy_(gradient)
    return gradient


def _fits(parameter: torch.Tensor, state: dict[str, Any], first: torch.Tensor, names: tuple[str, ...]) -> bool:
    """Whether the kernel can update this parameter together with the group's first one."""
    if parameter.dtype is not first.dtype or parameter.dtype not in kernels.DTYPES or parameter.numel() > MAX_ELEMENTS:
        return False
    if any(state.get(name) is None for name in names):  # it has had no gradient yet, and gets none in the recording
        return parameter.grad is None
    moments = [state[name] for name in names if name != "step"]
    if "step" in names and not (state["step"].dtype is torch.float32 and state["step"].is_cuda):
        return False
    dense = parameter.is_contiguous() or (
        parameter.dim() == 4 and parameter.is_contiguous(memory_format=torch.channels_last)
    )
    same = all(one.dtype is parameter.dtype and one.stride() == parameter.stride() for one in moments)
    aligned = not any(tensor.data_ptr() % ALIGNMENT for tensor in (parameter, *moments))
    return dense and same and aligned and parameter.is_cuda
