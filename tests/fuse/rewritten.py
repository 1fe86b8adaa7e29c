"""A function's graphs, rewritten by force and run as PyTorch operations: what tests compare with the original."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import fx, nn

from onelaunch.fuse.captured import own_code
from onelaunch.fuse.patterns import BY_NAME, rewrite
from onelaunch.fuse.patterns.pattern import Match


class Rewritten:
    """Calls `function` with its captured graphs rewritten; `titles` says what was replaced."""

    def __init__(
        self, function: Callable[..., Any], names: Collection[str] = tuple(BY_NAME), aot: bool = False
    ) -> None:
        self.matches: list[Match] = []
        self.graphs: list[fx.GraphModule] = []

        def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Any:
            self.matches += rewrite(gm, names, forced=True)
            gm.graph.lint()
            self.graphs.append(gm)
            return torch._dynamo.lookup_backend("aot_eager")(gm, example_inputs) if aot else gm.forward

        call = function.forward if isinstance(function, nn.Module) else function
        self._compiled = torch.compile(own_code(call), backend=backend)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._compiled(*args, **kwargs)

    @property
    def titles(self) -> list[str]:
        return [match.title for match in self.matches]


def titles_of(function: Callable[..., Any], *args: Any) -> list[str]:
    """What the patterns replace in `function` at these arguments."""
    rewritten = Rewritten(function)
    rewritten(*args)
    return rewritten.titles
