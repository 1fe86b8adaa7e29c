"""The cases of PyTorch's `module_db`: how each module is made, and the inputs of its forward."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from tests import pairwise
from tests.databases.load import load

INFOS = {info.name: info for info in load("modules", "module_db") if torch.float32 in info.supported_dtypes("cpu")}
SEED = 20


@dataclass(frozen=True)
class Case:
    """One entry of the list that `INFOS[name]` makes for this mode."""

    name: str
    index: int
    training: bool

    def __str__(self) -> str:
        return f"{self.name}-{self.index}-{'train' if self.training else 'eval'}"

    def make(self, device: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
        """The module on `device` in the case's mode, and the arguments of its forward; the same in every call.

        Recurrent modules on CUDA are in training mode in any case: cuDNN differentiates them in no other.
        """
        torch.manual_seed(SEED)
        entry = inputs_of(self.name, self.training, device)[self.index]
        given, inputs = entry.constructor_input, entry.forward_input
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of settings that PyTorch finds unwise
            module = INFOS[self.name].module_cls(*given.args, **given.kwargs)
        training = self.training or (device == "cuda" and isinstance(module, nn.RNNBase))
        return module.to(device, torch.float32).train(training), *copy_of((tuple(inputs.args), dict(inputs.kwargs)))


def inputs_of(name: str, training: bool, device: str) -> list[Any]:
    info = INFOS[name]
    return list(
        info.module_inputs_func(info, device=device, dtype=torch.float32, requires_grad=True, training=training)
    )


def cases(every: bool = pairwise.ALL_CASES) -> list[Case]:
    """One case per module, by turns another one and in another mode; with `--all-cases`, or `every`, all of them.

    A module has both modes where the database says that they differ, or where it has children.
    """
    torch.manual_seed(SEED)
    found: list[Case] = []
    for number, (name, info) in enumerate(INFOS.items()):
        both = info.train_and_eval_differ or "Transformer" in name
        of_this = [
            Case(name, index, training)
            for training in ((True, False) if both else (number % 2 == 0,))
            for index in range(len(inputs_of(name, training, "cpu")))
        ]
        found += of_this if every else [of_this[(number * 7) % len(of_this)]]
    return found


def copy_of(values: Any) -> Any:
    """Leaves of the same values, for each tensor in tuples, lists and dicts."""

    def copied(value: Any) -> Any:
        return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value

    return tree_map(copied, values)


def tensors_of(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def is_lazy(module: nn.Module) -> bool:
    """Whether the shapes of its parameters wait for its first call."""
    return any(map(nn.parameter.is_lazy, (*module.parameters(), *module.buffers())))
