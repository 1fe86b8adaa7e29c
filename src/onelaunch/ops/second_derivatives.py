"""What an op whose gradient may itself be differentiated needs beside its kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor


def differentiable_gradients(
    function: Callable[..., Tensor], inputs: Sequence[Tensor | None], upstream: Tensor
) -> list[Tensor | None]:
    """The gradient of `function(*inputs)` for each input that requires one, in ops that can be differentiated again.

    By views of the inputs: one of them may be there twice, or be computed from another.
    """
    with torch.enable_grad():
        views = [None if one is None else one.view_as(one) for one in inputs]
        value = function(*views)
    wanted = [one for one in views if one is not None and one.requires_grad]
    found = iter(torch.autograd.grad(value, wanted, upstream.to(value.dtype), create_graph=True))
    return [next(found) if one is not None and one.requires_grad else None for one in views]


class Unsaved:
    """Inputs that only a second derivative needs, by name. They are left out of `save_for_backward`, so that an ordinary
    backward pass allows changing them in place before, as PyTorch does; None stands for one that is saved, or was not given.

    For biases, and for what a compiler traces: a tensor that is kept here lives as long as the graph, and for ever if a result
    of the op changes it in place.
    """

    def __init__(self, op: str, tensors: Mapping[str, Tensor | None]) -> None:
        self._op, self._tensors = op, tensors
        self._versions = {
            name: one._version for name, one in tensors.items() if one is not None and not one.is_inference()
        }

    def unchanged(self) -> list[Tensor | None]:
        """The tensors, in their order. Raises RuntimeError if one was changed in place since."""
        for name, version in self._versions.items():
            one = self._tensors[name]
            if one is not None and one._version != version:
                raise RuntimeError(
                    f"{name} was changed in place after {self._op} used it: its gradient cannot be differentiated"
                )
        return [*self._tensors.values()]
