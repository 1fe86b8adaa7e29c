"""Whether a loss depends on random numbers that PyTorch draws on the host, which a recording would repeat for ever.

Models of `transformers` draw a number per layer and leave the layer out if it is below `layerdrop`, which is 0 in most: such
steps can be recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

LARGEST = 1 - 2.0**-24  # below 1
UNIFORM = {torch.rand, torch.rand_like}


class Uniform(TorchFunctionMode):
    """Inside, uniform random numbers on the host are all this value, or drawn if it is None."""

    def __init__(self, value: float | None) -> None:
        super().__init__()
        self.value = value

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if self.value is None or not isinstance(result, torch.Tensor) or result.device.type != "cpu":
            return result
        if function in UNIFORM:
            return result.fill_(self.value)
        if function is torch.Tensor.uniform_:
            given = {**dict(zip(("from", "to"), args[1:], strict=False)), **kwargs}
            low, high = given.get("from", 0.0), given.get("to", 1.0)
            return result.fill_(low + self.value * (high - low))
        return result


@torch.no_grad()
def depends_on_draws(loss: Callable[[], torch.Tensor], undo: Callable[[], None]) -> bool:
    """Whether `loss()` has other bits with other random numbers of the host; with `undo()` between, which leaves no trace.

    A decision that is rare differs for the smallest or the largest number.
    """
    found = []
    for seed, value in ((0, None), (1, None), (0, 0.0), (0, LARGEST)):
        torch.default_generator.manual_seed(seed)
        try:
            with Uniform(value):
                found.append(loss())
        finally:
            undo()
    return not all(torch.equal(found[0], one) for one in found[1:])
