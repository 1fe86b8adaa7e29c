"""Tensors that the models of a sweep share although training changes them: the results would depend on the order."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from onelaunch.errors import OnelaunchError
from onelaunch.train.fingerprints import checksum
from onelaunch.trial_runs import kept_modes


class SharedTensors:
    """Knows the tensors of all models that are in use. What no model changes, such as a frozen backbone, may be shared."""

    def __init__(self) -> None:
        self._known: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()  # by id
        self._buffers: dict[
            int, tuple[str, torch.Tensor, int]
        ] = {}  # name, tensor and checksum of those that are shared
        self._frozen: dict[int, tuple[str, nn.Parameter]] = {}  # name and tensor of the parameters that are shared

    def __reduce__(self) -> tuple[type[SharedTensors], tuple[()]]:
        """Another process has copies of its own."""
        return SharedTensors, ()

    def add(self, model: nn.Module) -> None:
        """Raises OnelaunchError if another model has one of `model`'s trainable parameters or running statistics."""
        for name, parameter in model.named_parameters():
            if self._has(parameter) and parameter.requires_grad:
                raise _error(name)
            if self._has(parameter):
                self._frozen[id(parameter)] = name, parameter
            self._known[id(parameter)] = parameter
        statistics: set[int] | None = None
        for name, buffer in model.named_buffers():
            if self._has(buffer):
                statistics = set(_statistics(model)) if statistics is None else statistics
                if id(buffer) in statistics:
                    raise _error(name)
                if id(buffer) not in self._buffers:
                    self._buffers[id(buffer)] = name, buffer, checksum((buffer,))
            self._known[id(buffer)] = buffer

    def check_unchanged(self) -> None:
        """Raises OnelaunchError if training has changed a buffer, or a callback has unfrozen a parameter, that several models
        have."""
        for name, parameter in list(self._frozen.values()):
            if parameter.requires_grad:
                raise _error(name)
        for name, buffer, before in list(self._buffers.values()):  # another thread may add some
            if checksum((buffer,)) != before:
                raise _error(name)

    def _has(self, tensor: torch.Tensor) -> bool:
        return self._known.get(id(tensor)) is tensor


def _statistics(model: nn.Module) -> Iterator[int]:
    """The ids of the buffers of batch and instance norms that `model.train()` puts into training mode."""
    with kept_modes(model):
        model.train()
        for module in model.modules():
            if isinstance(module, _NormBase) and module.training:
                yield from map(id, module.buffers(recurse=False))


def _error(name: str) -> OnelaunchError:
    return OnelaunchError(
        f"make_model returned models that share {name}, which training changes: make a new one in each call, or share frozen "
        "modules only (requires_grad_(False))"
    )
