"""Memory and modes of the modules that a step runs, where a recording needs more than to read them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn

from onelaunch.capture.dependencies import has_address
from onelaunch.trial_runs import attributes_of, restore


class ModelState:
    """The state of the modules among `roots`, and of the optimizer's `parameters()`."""

    def __init__(self, roots: Sequence[Any], parameters: Callable[[], Iterable[torch.Tensor]]) -> None:
        self._roots = [one for one in roots if isinstance(one, nn.Module)]
        self._parameters = parameters

    def modules(self) -> list[nn.Module]:
        return [*{id(one): one for root in self._roots for one in root.modules()}.values()]

    def _tensors(self) -> list[torch.Tensor]:
        """Parameters and buffers, those of the optimizer too."""
        tables = chain.from_iterable((one._parameters, one._buffers) for one in self.modules())
        entries = chain.from_iterable(table.values() for table in tables if isinstance(table, dict))  # not a script's
        tensors = [one for one in (*self._parameters(), *entries) if isinstance(one, torch.Tensor)]
        return [one for one in {id(one): one for one in tensors}.values() if has_address(one)]

    def constants(self) -> dict[str, Any]:
        """Attributes of modules that are numbers or words, by name, such as one that counts calls."""
        return {
            f"{type(module).__name__}.{name}": value
            for module in self.modules()
            for name, value in vars(module).items()
            if type(value) in (bool, int, float, str)
        }

    def renew_gradient_nodes(self) -> None:
        """Between passes on different streams: autograd adds up a parameter's gradients on the stream of the pass that made its
        node, for as long as an output of that pass is kept, and a recording cannot wait for another stream.

        A tensor that has had another dtype gets a new node. Hooks that are registered on tensors stay, those on nodes do not.
        """
        for tensor in self._tensors():
            if tensor.requires_grad and tensor.is_leaf and _node_is_kept(tensor):
                data = tensor.data
                other = torch.float16 if data.dtype is torch.float32 else torch.float32
                tensor.data = torch.empty(0, dtype=other, device=data.device)
                tensor.data = data

    @contextmanager
    def carried(self) -> Iterator[None]:
        """Around a step: what forward puts in the place of buffers or parameters' memory is written into what was there."""
        buffers = [(one._buffers, dict(one._buffers)) for one in self.modules() if isinstance(one._buffers, dict)]
        memory = [(one, one.data) for one in self._tensors()]
        yield
        with torch.no_grad():
            for table, before in buffers:
                for name, old in before.items():
                    new = table.get(name)
                    if old is not None and new is not None and new is not old and _is_alike(old, new):
                        table[name] = old.copy_(new)
            for tensor, data in memory:
                if tensor.data_ptr() != data.data_ptr() and _is_alike(data, tensor):
                    data.copy_(tensor)
                    tensor.data = data

    def undo(self) -> Callable[[], None]:
        """To call after a recording that failed: what forward has set meanwhile was never computed."""
        attributes, memory = attributes_of(self.modules()), [(one, one.data) for one in self._tensors()]

        def put_back() -> None:
            restore(attributes)
            for tensor, data in memory:
                if tensor.data_ptr() != data.data_ptr():
                    tensor.data = data

        return put_back


def _is_alike(old: torch.Tensor, new: torch.Tensor) -> bool:
    """Whether one can be written into the memory of the other."""
    same = old.shape == new.shape and old.dtype is new.dtype and old.device == new.device
    return same and has_address(old) and has_address(new)


def _node_is_kept(tensor: torch.Tensor) -> bool:
    """Whether the node that adds up the gradients of a leaf is in use, as by a graph that lives."""
    mark = object()
    _gradient_node(tensor).metadata[mark] = True
    return _gradient_node(tensor).metadata.pop(mark, False)  # else it is another one


@torch.enable_grad()
def _gradient_node(tensor: torch.Tensor) -> Any:
    (node, _), *_ = tensor.expand_as(tensor).grad_fn.next_functions  # type: ignore[union-attr]
    return node
