"""An optimizer of `torch.optim` whose step can be recorded in a CUDA graph.

A recorded step reads nothing from the host, so the learning rate must be a tensor on the device and Adam's step count too; and
for updates by a kernel of ours, so must be other settings that a scheduler may change, such as the momentum. The user's
optimizer stays the one that is stepped: schedulers and `state_dict` work on it as before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from onelaunch.step.inputs import are_same_objects, is_same_value

FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)


class Rule(NamedTuple):
    """How one of our kernels updates."""

    name: str
    settings: tuple[str, ...]  # what it reads on the device, beside the rate


ADAM = Rule("adam", ("betas", "eps", "weight_decay"))
RULES: dict[type[Optimizer], Rule] = {
    torch.optim.Adam: ADAM,
    torch.optim.AdamW: ADAM,
    torch.optim.SGD: Rule("sgd", ("momentum", "dampening", "weight_decay")),
}
STEPPED_ON_HOST = (torch.optim.LBFGS, torch.optim.SparseAdam)


class CapturableOptimizer:
    """Prepares `optimizer` for capture, and keeps its learning rates on the device."""

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self.optimizer, self.device = optimizer, device
        self._groups: list[_Group] = []
        self._values: list[tuple[Any, ...]] = []
        self._known: list[Any] = []  # as `_objects`
        self._tensors: list[torch.Tensor] = []  # its state
        self._addresses: list[int] = []
        names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")  # a wrapper may lack what `Optimizer` makes
        self._hook_tables = [getattr(optimizer, name, {}) for name in names]
        self._hooks: list[int] = []  # their numbers

    @property
    def rates(self) -> list[torch.Tensor]:
        """0-d tensors on the device, one per group."""
        return [group.rate for group in self._groups]

    @property
    def settings(self) -> list[torch.Tensor]:
        """The `settings_on_device`, one tensor per group."""
        return [group.settings for group in self._groups]

    def unsupported_reason(self) -> str:
        """Why its step cannot be recorded; empty when it can."""
        if isinstance(self.optimizer, STEPPED_ON_HOST):
            return f"{type(self.optimizer).__name__} decides on the host"
        for group in self.optimizer.param_groups:
            if "capturable" not in group and not isinstance(self.optimizer, FUSED):
                return f"{type(self.optimizer).__name__} has no capturable form"
        return ""

    def prepare(self) -> None:
        """Switch to the fused and capturable form. The step counts of a state that exists already move to the device."""
        # Steps before a recording are not captured. PyTorch warns of that where an optimizer has been copied or unpickled.
        self.optimizer._warned_capturable_if_run_uncaptured = True
        for group in self.optimizer.param_groups:
            if "capturable" in group:
                group["capturable"] = True
            if isinstance(self.optimizer, FUSED) and group.get("fused") is None and not group.get("differentiable"):
                floating = all(parameter.is_floating_point() for parameter in group["params"])
                waits = bool(group.get("dampening"))  # the fused form takes no parameter whose momentum begins later
                group["fused"] = group.get("foreach") is None and floating and not waits
            if group.get("fused"):
                self.optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
        for state in self.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].to(self.device, torch.float32)
        self._groups = [_Group(self.optimizer, group, self.device) for group in self.optimizer.param_groups]
        self._remember()

    def follow_update(self, is_ours: bool) -> None:
        """After a recording: one with the optimizer's own update has all settings but the rate in it."""
        # A scheduler that is made later would warn that the optimizer has not stepped: replays do not call its step.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        if not is_ours:
            for group in self._groups:
                group.remember(update_is_ours=False)

    @contextmanager
    def rates_on_device(self) -> Iterator[None]:
        """Around a step: inside, the groups hold tensors as learning rates; afterwards, what they held before."""
        begin_momentum(self.optimizer)
        before = [group["lr"] for group in self.optimizer.param_groups]
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate
        try:
            yield
        finally:
            for group, rate in zip(self.optimizer.param_groups, before, strict=True):
                group["lr"] = rate
            self._remember()

    def upload(self) -> None:
        """Write the learning rates and settings that a scheduler has changed to the device."""
        for group in self._groups:
            group.upload()

    def ready(self) -> bool:
        """Whether a recording still fits the optimizer's settings, with what it reads of them on the device.

        Called on every step, so it is fast while no value in any group has changed.
        """
        if not self._has_its_objects():
            return False
        # Of its state only one tensor is looked at: whoever moves one moves all of them.
        if self._tensors and self._tensors[0].data_ptr() != self._addresses[0]:
            return False
        values = [tuple(group.values()) for group in self.optimizer.param_groups]
        if _are_equal(values, self._values):
            return True
        if self._groups_differ():
            return False
        self.upload()
        # A scheduler may change a rate that is a tensor elsewhere in place: the same object is no proof.
        self._values = [] if any(group.has_rate_elsewhere() for group in self._groups) else values
        return True

    def settings_changed(self) -> bool:
        """Whether a group, or a setting that is not read on the device, or what it updates differs from what was recorded."""
        return not self._has_its_objects() or self._has_moved() or self._groups_differ()

    def _groups_differ(self) -> bool:
        return any(group.differs() for group in self._groups)

    def _has_its_objects(self) -> bool:
        """`load_state_dict` makes new groups, and new state that a recording does not read."""
        before, after = self._hook_tables
        if (before or after or self._hooks) and [*before, *after] != self._hooks:
            return False
        return are_same_objects(self._objects(), self._known)

    def _remember(self) -> None:
        self._known, self._hooks = self._objects(), list(chain(*self._hook_tables))
        state = chain.from_iterable(map(dict.values, self.optimizer.state.values()))
        self._tensors = [one for one in state if isinstance(one, torch.Tensor) and one.layout is torch.strided]
        self._addresses = [one.data_ptr() for one in self._tensors]

    def _has_moved(self) -> bool:
        """Whether its state has other memory, as by `.data`."""
        return any(one.data_ptr() != address for one, address in zip(self._tensors, self._addresses, strict=True))

    def _objects(self) -> list[Any]:
        """The state, that of each parameter with its tensors, the groups and their parameters."""
        state = self.optimizer.state
        objects = [state, *chain.from_iterable(map(dict.values, state.values())), *self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            objects += group["params"]
        return objects


class _Group:
    """A group of parameters: its rate and settings on the device, and those of its settings that a recording has in it."""

    def __init__(self, optimizer: Optimizer, group: dict[str, Any], device: torch.device) -> None:
        self.optimizer, self.group = optimizer, group
        self.rate = _rate_tensor(group["lr"], device)
        self.rate_is_users = group["lr"] is self.rate  # it must not be written to
        count = len(settings_on_device(optimizer, group))
        self.settings = torch.zeros(count, dtype=torch.float64, device=device)
        self._cells = [self.rate, *self.settings.unbind()]
        self._on_device = [math.nan] * len(self._cells)
        self.remember(update_is_ours=True)

    def remember(self, update_is_ours: bool) -> None:
        """What a recording has in it: all settings but those that its update reads on the device."""
        left_out = {"params", "lr", "initial_lr"}
        if update_is_ours:
            left_out.update(_read_on_device(self.optimizer))
        self._recorded = [one for one in self.group.items() if one[0] not in left_out]
        self._kind = self._find_kind()

    def upload(self) -> None:
        values = [self.group["lr"], *settings_on_device(self.optimizer, self.group)]
        for index, (value, cell) in enumerate(zip(values, self._cells, strict=True)):
            if value is not cell and value != self._on_device[index]:
                cell.fill_(value)
                self._on_device[index] = float(value)

    def has_rate_elsewhere(self) -> bool:
        """Whether its rate is a tensor that recordings do not read."""
        return isinstance(self.group["lr"], torch.Tensor) and self.group["lr"] is not self.rate

    def differs(self) -> bool:
        """Whether a recording does not fit its settings any more."""
        if self.rate_is_users and self.group["lr"] is not self.rate:
            return True
        for name, value in self._recorded:
            found = self.group.get(name)
            if found is not value and not is_same_value(found, value):
                return True
        return self._find_kind() != self._kind

    def _find_kind(self) -> tuple[int, bool]:
        """How much our update reads on the device, and whether there is momentum."""
        return len(settings_on_device(self.optimizer, self.group)), bool(self.group.get("momentum"))


def settings_on_device(optimizer: Optimizer, group: dict[str, Any]) -> list[float]:
    """The settings of a group that our update reads on the device; none where one is a tensor."""
    values: list[Any] = []
    for name in _read_on_device(optimizer):
        values += group[name] if name == "betas" else (group[name],)
    for one in values:  # faster than `any`, which counts where a scheduler changes settings in every step
        if isinstance(one, torch.Tensor):
            return []
    return values


def _read_on_device(optimizer: Optimizer) -> tuple[str, ...]:
    rule = RULES.get(type(optimizer))
    return rule.settings if rule else ()


def begin_momentum(optimizer: Optimizer) -> None:
    """Fused SGD takes no parameters with momentum beside others without, such as layers that have just been unfrozen."""
    if not isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        if not group["momentum"] or group["dampening"]:  # the first gradient is not dampened
            continue
        for parameter in group["params"]:
            if parameter.requires_grad and optimizer.state[parameter].get("momentum_buffer") is None:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """All parameters, also of groups that were added later."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _rate_tensor(rate: float | torch.Tensor, device: torch.device) -> torch.Tensor:
    """A rate that is a tensor on the device already is read where it is: its scheduler writes to it in place."""
    if isinstance(rate, torch.Tensor) and rate.device == device:
        return rate
    return torch.tensor(float(rate), device=device)


def _are_equal(values: list[tuple[Any, ...]], others: list[tuple[Any, ...]]) -> bool:
    try:
        return values == others
    except (RuntimeError, ValueError):  # of two tensors or arrays that are not the same one
        return False
