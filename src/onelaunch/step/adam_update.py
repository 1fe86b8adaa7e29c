"""The step of `torch.optim.Adam` and `AdamW` in a recording: one launch of our kernel per group of parameters.

The optimizer's own step runs first and creates its state; the recording then updates that state in place. The addresses of
gradients are known only once the step is recorded, so the tables are filled after it, before the first replay.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Adam, AdamW, Optimizer

from onelaunch.integers import ceil_div
from onelaunch.kernels import adam
from onelaunch.kernels.launch import compiling

MAX_ELEMENTS = 2**31 - adam.CHUNK  # of one tensor: the kernel counts them in 32 bits
ALIGNMENT = 16


class AdamUpdate:
    """Updates the parameters of `optimizer`, with the learning rates in these 0-d tensors on the device, one per group."""

    def __init__(self, optimizer: Optimizer, rates: list[torch.Tensor]) -> None:
        self.groups = [_Group(optimizer, *pair) for pair in zip(optimizer.param_groups, rates, strict=True)]

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
    def __init__(self, optimizer: Optimizer, group: dict[str, Any], rate: torch.Tensor) -> None:
        self.optimizer, self.group, self.rate = optimizer, group, rate
        device, parameters = rate.device, group["params"]
        self.dtype = parameters[0].dtype
        self.addresses = torch.empty(len(parameters), adam.COLUMNS, dtype=torch.int64, device=device)
        programs = sum(ceil_div(parameter.numel(), adam.CHUNK) for parameter in parameters)
        self.chunks = torch.empty(programs, 2, dtype=torch.int32, device=device)
        values = *group["betas"], group["eps"], group["weight_decay"]
        self.settings = torch.tensor([float(value) for value in values], dtype=torch.float64, device=device)
        self.rows: list[list[int]] = []
        self.counts: list[int] = []
        self.steps: list[torch.Tensor] = []
        self.copies: list[torch.Tensor] = []  # alive while the recording is
        with compiling():  # before a recording
            self._launch(1)

    def collect(self) -> None:
        updated = [parameter for parameter in self.group["params"] if parameter.grad is not None]
        states = [self.optimizer.state[parameter] for parameter in updated]
        self.steps = [state["step"] for state in states]
        gradients = [_as_laid_out(parameter) for parameter in updated]
        self.copies = [one for one, parameter in zip(gradients, updated, strict=True) if one is not parameter.grad]
        self.rows, self.counts = [], []
        for parameter, gradient, state in zip(updated, gradients, states, strict=True):
            tensors = parameter, gradient, state["exp_avg"], state["exp_avg_sq"], state["step"]
            self.rows.append([*(tensor.data_ptr() for tensor in tensors), parameter.numel()])
            self.counts.append(ceil_div(parameter.numel(), adam.CHUNK))

    def launch(self) -> None:
        if self.steps:
            torch._foreach_add_(self.steps, 1)
            self._launch(sum(self.counts))

    def _launch(self, programs: int) -> None:
        decoupled = bool(self.group.get("decoupled_weight_decay", isinstance(self.optimizer, AdamW)))
        adam.adam(
            self.addresses, self.chunks, self.settings, self.rate, programs, self.dtype, decoupled=decoupled,
            maximize=self.group["maximize"],
        )  # fmt: skip

    def fill_tables(self) -> None:
        if self.rows:
            self.addresses[: len(self.rows)].copy_(torch.tensor(self.rows))
            chunks = [[row, chunk] for row, count in enumerate(self.counts) for chunk in range(count)]
            self.chunks[: len(chunks)].copy_(torch.tensor(chunks, dtype=torch.int32))


def create_state(optimizer: Optimizer) -> None:
    """The state that the first step of Adam or AdamW would create, where there is none: so that our update can be the first."""
    if type(optimizer) in (Adam, AdamW):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if not optimizer.state[parameter]:
                    count = torch.zeros((), dtype=torch.float32, device=parameter.device)
                    moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
                    optimizer.state[parameter].update({"step": count, **moments})


def adam_update(
    optimizer: Optimizer, rates: list[torch.Tensor], scaler: torch.amp.GradScaler | None
) -> AdamUpdate | None:
    """The update for this optimizer; None where its own step must be recorded: another class, option, type or layout."""
    hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    if type(optimizer) not in (Adam, AdamW) or scaler is not None or hooks:
        return None
    if any(group["amsgrad"] or group["differentiable"] or not group["params"] for group in optimizer.param_groups):
        return None
    for group in optimizer.param_groups:
        if not all(
            _fits(parameter, optimizer.state.get(parameter), group["params"][0]) for parameter in group["params"]
        ):
            return None
    return AdamUpdate(optimizer, rates)


def _as_laid_out(parameter: torch.Tensor) -> torch.Tensor:
    """The parameter's gradient with its strides and alignment: as it is, or a copy. It stays where recordings add to it."""
    gradient = parameter.grad
    assert gradient is not None
    if gradient.stride() != parameter.stride() or gradient.data_ptr() % ALIGNMENT:
        return torch.empty_like(parameter).copy_(gradient)
    return gradient


def _fits(parameter: torch.Tensor, state: Any, first: torch.Tensor) -> bool:
    """Whether the kernel can update this parameter together with the group's first one."""
    if parameter.dtype is not first.dtype or parameter.dtype not in adam.DTYPES or parameter.numel() > MAX_ELEMENTS:
        return False
    if not state:  # it has had no gradient yet, and gets none in the recording
        return parameter.grad is None
    states = state["exp_avg"], state["exp_avg_sq"]
    dense = parameter.is_contiguous() or (
        parameter.dim() == 4 and parameter.is_contiguous(memory_format=torch.channels_last)
    )
    same = all(one.dtype is parameter.dtype and one.stride() == parameter.stride() for one in states)
    aligned = not any(tensor.data_ptr() % ALIGNMENT for tensor in (parameter, *states))
    return dense and same and aligned and state["step"].dtype is torch.float32 and state["step"].is_cuda
