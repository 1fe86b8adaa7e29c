"""A function's graphs, rewritten by force and run as PyTorch operations: what tests compare with the original."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection
from typing import Any

import torch
from hypothesis import assume
from torch import fx, nn

from onelaunch.capture.dynamo import compile_by
from onelaunch.fuse.captured import capture_graphs
from onelaunch.fuse.patterns import BY_NAME, rewrite
from onelaunch.fuse.patterns.pattern import Match
from tests.conftest import TOLERANCE


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
        self._compiled = compile_by(backend, call)

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


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor | None]:
    return [x.grad, *(parameter.grad for parameter in model.parameters())]


def amplifies_rounding(model: nn.Module, x: torch.Tensor, upstream: torch.Tensor) -> bool:
    """Whether gradients change by more than the tolerance if all inputs do by 1e-14 of them, as behind several batch norms of
    columns that are almost constant: then right results differ as well.
    """
    rtol, atol = TOLERANCE[torch.float64]
    found = []
    for size in (0.0, 1e-14):
        one, own, above = copy.deepcopy(model), x.detach().clone().requires_grad_(), upstream.clone()
        with torch.no_grad():
            for tensor in (own, above, *one.parameters()):
                tensor.mul_(1 + size * torch.randn_like(tensor))
        one(own).backward(above)
        found.append([gradient for gradient in gradients(one, own) if gradient is not None])
    return not all(torch.allclose(a, b, rtol, 10 * atol) for a, b in zip(*found, strict=True))


def assert_same_step(
    model: nn.Module, x: torch.Tensor, titles: list[str] | None = None, aot: bool = False
) -> Rewritten:
    """Outputs, gradients and buffers of the rewritten model, against the original's in float64."""
    rtol, atol = TOLERANCE[torch.float64]
    model, x = model.double(), x.double()
    other, x, y = copy.deepcopy(model), x.clone().requires_grad_(), x.clone().requires_grad_()
    expected = other(y)
    upstream = torch.randn_like(expected)
    try:
        expected.backward(upstream)
    except RuntimeError:
        assume(False)  # PyTorch itself refuses a value that is changed in place after it was saved
    original, rewritten = copy.deepcopy(model), Rewritten(model, aot=aot)
    got = rewritten(x)
    if titles is not None:
        assert rewritten.titles == titles
    torch.testing.assert_close(got, expected, rtol=rtol, atol=atol)
    got.backward(upstream)
    names = ["x", *(name for name, _ in model.named_parameters())]
    for name, one, two in zip(names, gradients(model, x), gradients(other, y), strict=True):
        if one is not None and two is not None and not torch.allclose(one, two, rtol, 10 * atol):
            assume(not amplifies_rounding(original, x, upstream))
        torch.testing.assert_close(one, two, rtol=rtol, atol=10 * atol, msg=name)
    for (name, one), two in zip(model.named_buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(one, two, rtol=rtol, atol=atol, msg=name)
    return rewritten


class Of(nn.Module):
    """A module whose forward is a function of (module, x)."""

    def __init__(self, function: Callable[..., torch.Tensor], **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


def nodes_of(function: Any, *args: Any) -> list[fx.Node]:
    """The operations that Dynamo captures of a function without graph breaks."""
    (captured,) = capture_graphs(function, args, {})
    return [node for node in captured.graph.nodes if node.op in ("call_function", "call_method")]


def view_and_add(x: torch.Tensor) -> torch.Tensor:
    """Five operations: a product, a view of it, its relu, which the last one changes in place, and a sum."""
    a = x * 2
    b = a.view(-1)
    c = torch.relu(a)
    return c.add_(b.sum())
