"""What a traced forward asks of tensors that are no proxies, such as those `self.parameters()` gives, and what they answered.

The answers are part of the graph, and so the guard of the trace asks again: a model may be moved, converted or frozen later.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.overrides import TorchFunctionMode

from onelaunch.fuse.refused import RefusedError

_PROPERTIES = frozenset(
    {
        *("dtype", "device", "layout", "requires_grad", "shape", "ndim", "itemsize", "nbytes"),
        *("is_cpu", "is_cuda", "is_meta", "is_sparse", "is_quantized", "is_leaf"),
    }
)
_METHODS = frozenset(
    {"dim", "size", "numel", "stride", "element_size", "is_floating_point", "is_complex", "is_contiguous"}
)


@dataclass(frozen=True)
class Question:
    tensor: torch.Tensor
    name: str
    arguments: tuple[Any, ...] | None  # of a method
    answer: Any


class NoTensorsOfItsOwn(TorchFunctionMode):
    """Refuses torch calls without a proxy, whose result would be frozen into the graph; keeps questions and their answers."""

    def __init__(self) -> None:
        super().__init__()
        self.questions: dict[tuple[Any, ...], Question] = {}

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        # A change of mode is seen at the next node.
        if any(issubclass(kind, fx.Proxy) for kind in kinds) or name == "_set_grad_enabled":
            return func(*args, **(kwargs or {}))
        if name == "__get__":
            name = func.__self__.__name__
            if name not in _PROPERTIES:
                raise RefusedError(f"asks a tensor for its {name}")
            return self._asked(func, args[0], name, None)
        if name in _METHODS and not kwargs:
            return self._asked(func, args[0], name, args[1:])
        raise RefusedError(f"makes a tensor of its own ({name})")

    def _asked(self, function: Any, tensor: torch.Tensor, name: str, arguments: tuple[Any, ...] | None) -> Any:
        answer = function(tensor, *(arguments or ()))
        self.questions[id(tensor), name, arguments] = Question(tensor, name, arguments, answer)
        return answer


Asked = tuple[dict[str, Any], str, str, tuple[Any, ...] | None, Any]


def asked_at_places(questions: Iterable[Question], modules: Iterable[nn.Module]) -> list[Asked]:
    """The questions by the dictionary and the name under which the modules hold each tensor; another may be there later."""
    places: dict[int, tuple[dict[str, Any], str]] = {}
    for module in modules:
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                places.setdefault(id(tensor), (tensors, name))
    return [
        (*places.get(id(one.tensor), ({"": one.tensor}, "")), one.name, one.arguments, one.answer) for one in questions
    ]
