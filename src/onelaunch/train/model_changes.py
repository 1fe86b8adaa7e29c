"""What callbacks have changed in a model: what it was before them, compared with what it is now.

An engine with code of its own takes from a model the values of its tensors, which of them train, and the layers that forward
applies. All three are compared. The modes (`training`) are not: every engine trains in training mode, whatever they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from onelaunch.engines.contract import Run
from onelaunch.run.known_functions import KNOWN_MODULES
from onelaunch.run.parse import CONTAINERS, GLOBAL_HOOKS
from onelaunch.train.inputs import network_of

PLAIN = (bool, int, float, complex, str, bytes, type(None))
Settings = dict[str, dict[str, Any]]  # the attributes of modules, by path


@dataclass(frozen=True)
class Held:
    """A parameter or buffer as it was."""

    tensor: torch.Tensor
    memory: torch.Tensor  # `tensor.data`: it shares the values, and keeps them where they are alive
    trains: bool
    hooks: int
    version: int | None  # None: of a tensor that does not count its changes
    values: torch.Tensor | None  # a copy on the CPU; None: only the version is compared


class ModelBefore:
    """A run's model before callbacks."""

    def __init__(self, run: Run, *, values: bool) -> None:
        """values: also compare values, for which they are copied; else only what PyTorch counts as a change of a tensor."""
        self.run, self.model = run, run.model
        self.tensors = {name: _held(tensor, values) for name, tensor in tensors_of(self.model).items()}
        self.modules = dict(self.model.named_modules())
        self._modes = {module: module.training for module in self.modules.values()}
        self._settings = _settings(self.model)

    def difference(self) -> str:
        """The first thing that has changed, in words; empty if nothing has."""
        return self._changed_tensor() or self._changed_module() or self._changed_forward()

    def described_difference(self) -> str:
        """As `difference`, of a model that a session runs itself: its layers cannot be read while it does."""
        return self._changed_tensor() or self._changed_module() or _first_setting(self._settings, _settings(self.model))

    def has_new_parts(self) -> bool:
        """Whether there are modules, or parameters to train, that were not there or did not train."""
        trained = {id(held.tensor) for held in self.tensors.values() if held.trains}
        known = {id(module) for module in self.modules.values()}
        if any(id(module) not in known for module in self.model.modules()):
            return True
        return any(one.requires_grad and id(one) not in trained for one in self.model.parameters())

    def restore_modes(self) -> None:
        for module, mode in self._modes.items():
            module.training = mode

    def close(self, close_session: Callable[[], None]) -> None:
        """Close a session that writes its own weights into the tensors of before; the model keeps the values it has now."""
        now = [(tensor, tensor.data, tensor.detach().clone()) for tensor in tensors_of(self.model).values()]
        for held in self.tensors.values():  # the session's weights fit into these
            if not _same_memory(held.tensor.data, held.memory):
                held.tensor.data = held.memory
        close_session()
        for tensor, memory, values in now:
            if not _same_memory(tensor.data, memory):
                tensor.data = memory
            if _has_values(memory) and not same_bits(memory, values):
                memory.copy_(values)

    def _changed_tensor(self) -> str:
        now = tensors_of(self.model)
        for name in dict.fromkeys([*self.tensors, *now]):
            held, tensor = self.tensors.get(name), now.get(name)
            if held is None or tensor is not held.tensor:
                return f"{name} for another tensor" if held and tensor is not None else f"whether the model has {name}"
            if _trains(tensor) != held.trains:
                return f"requires_grad of {name}"
            if not _same_kind(tensor, held.memory) or not _same_values(tensor, held):
                return f"the values of {name}"
            if _hooks(tensor) != held.hooks:
                return f"the hooks of {name}"
        return ""

    def _changed_module(self) -> str:
        now = dict(self.model.named_modules())
        paths = dict.fromkeys([*self.modules, *now])
        return next((f"layer {path!r}" for path in paths if self.modules.get(path) is not now.get(path)), "")

    def _changed_forward(self) -> str:
        """Reading the layers again takes a millisecond or two, so a model is first asked for its settings, if those say all."""
        now = _settings(self.model)
        setting = _first_setting(self._settings, now)
        if not setting and all(map(_says_all, self.modules.values())):
            return ""
        if network_of(self.run) == (self.run.network, self.run.no_network_reason):
            return ""
        return setting or "what forward computes"


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same values, where NaN equals itself."""
    return _same_kind(a, b) and torch.equal(_bits(a), _bits(b))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _has_values(tensor: torch.Tensor) -> bool:
    """Whether the tensor's values can be compared: it is not sparse, quantized, on the meta device or not made yet."""
    return tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_meta or is_lazy(tensor))


def _same_kind(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and (a.dtype, a.device, a.layout) == (b.dtype, b.device, b.layout)


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return _has_values(a) and _same_kind(a, b) and a.data_ptr() == b.data_ptr() and a.stride() == b.stride()


def _same_values(tensor: torch.Tensor, held: Held) -> bool:
    if held.values is None:
        return _version(tensor) == held.version
    return torch.equal(_bits(tensor.cpu()), _bits(held.values))


def _held(tensor: torch.Tensor, values: bool) -> Held:
    is_plain = type(tensor) in (torch.Tensor, nn.Parameter) and _has_values(tensor)
    copied = tensor.detach().to("cpu", copy=True) if values and is_plain else None
    return Held(tensor, tensor.data, _trains(tensor), _hooks(tensor), _version(tensor), copied)


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def _trains(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and tensor.requires_grad


def _hooks(tensor: torch.Tensor) -> int:
    return len(tensor._backward_hooks or ()) + len(getattr(tensor, "_post_accumulate_grad_hooks", None) or ())


def _says_all(module: nn.Module) -> bool:
    """Whether the module's attributes say what it computes: its forward is PyTorch's or ours."""
    return type(module) in KNOWN_MODULES or type(module) in CONTAINERS


def _settings(model: nn.Module) -> Settings:
    """Types and attributes of the modules whose forward is known, without their modes, and the hooks on all modules."""
    found: Settings = {
        path: {"type": type(module)}
        | {name: _entries(value) for name, value in vars(module).items() if name != "training"}
        for path, module in model.named_modules()
        if _says_all(module)
    }
    found["every module"] = {"hooks": tuple(len(hooks) for hooks in GLOBAL_HOOKS)}
    return found


def _entries(value: Any) -> Any:
    """What is in a container, which somebody may change in place; else the value itself."""
    if isinstance(value, dict):
        return tuple((key, _entries(entry)) for key, entry in value.items())
    return tuple(value) if isinstance(value, list | set) else value


def _first_setting(before: Settings, now: Settings) -> str:
    """The first attribute that differs; empty if all are alike."""
    for path in dict.fromkeys([*before, *now]):
        was, has = before.get(path, {}), now.get(path, {})
        for name in dict.fromkeys([*was, *has]):
            if name not in was or name not in has or not _alike(was[name], has[name]):
                return f"the hooks of layer {path!r}" if name.endswith("_hooks") else f"{path}.{name}".lstrip(".")
    return ""


def _alike(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(_alike, a, b))
    both_nan = isinstance(a, float) and math.isnan(a) and math.isnan(b)
    return isinstance(a, PLAIN) and (a == b or both_nan)
