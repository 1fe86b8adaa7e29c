"""Models of `transformers` that leave out layers by chance draw a number per layer on the host, also where the chance is 0.

Dynamo ends a graph at each comparison of such a number, and a recording would repeat the decision for ever. Inside
`no_needless_draws` compiled code does not draw a number that it only compares with a chance of 0. Whisper, which is such a
model, also copies its configuration in every pass, which PyTorch 2.11 cannot follow: there it gets a `Configuration`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_draw, _deepcopy = torch.rand, copy.deepcopy


class Draw:
    """A number from 0 to 1, drawn when it is needed."""

    def __lt__(self, chance: Any) -> Any:
        return chance > 0 and _draw(()) < chance


def _rand(*args: Any, **kwargs: Any) -> Any:
    """`torch.rand`, which draws a number `torch.rand([])` of compiled code when it is needed."""
    if args == ([],) and not kwargs and torch.compiler.is_dynamo_compiling():
        return Draw()
    return _draw(*args, **kwargs)


class Configuration:
    """A copy of a model's configuration: what is set in it is not set in the other."""

    def __init__(self, copied: Any) -> None:
        self.copied = copied

    def __getattr__(self, name: str) -> Any:
        return getattr(self.copied, name)

    def get_text_config(self, *args: Any, **kwargs: Any) -> Any:
        return self


def _copy(value: Any, memo: Any = None) -> Any:
    """`copy.deepcopy`, which gives compiled code a `Configuration` for a configuration."""
    if torch.compiler.is_dynamo_compiling() and hasattr(value, "get_text_config"):
        return Configuration(value)
    return _deepcopy(value, memo)


@contextmanager
def no_needless_draws() -> Iterator[None]:
    before, copies = torch.rand, copy.deepcopy
    torch.rand = (
        _rand  # a mode of torch functions would do, but PyTorch 2.11 does not trace it for functions without tensors
    )
    copy.deepcopy = _copy  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.rand, copy.deepcopy = before, copies


def leaves_out_layers(model: nn.Module) -> bool:
    """Whether layers of the model, one of `transformers`, have a chance of being left out, be it 0."""
    modules = [*model.modules()]
    owners = [*modules, *(config for one in modules if hasattr(config := vars(one).get("config"), "__dict__"))]
    has_chance = any(name.endswith("layerdrop") for one in owners for name in vars(one))
    return has_chance and any(type(one).__module__.startswith("transformers.") for one in modules)
