"""Where the inputs of a captured graph come from: Dynamo's names for them, and the same as a person would write them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

# Parts of Dynamo's names, as regular expressions, and how a person would write them.
PLAIN_NAMES = (
    (r"G\['___\w+'\]\['(\w+)'\]", r"\1"), (r"G\['__import_(\w+)'\]", r"\1"), (r"_dot_", "."),
    (r"[GL]\['(\w+)'\]", r"\1"), (r"\._modules\['(\d+)'\]", r"[\1]"),
    (r"\._(?:modules|parameters|buffers)\['([^']+)'\]", r".\1"), (r"\.__\w+__", ""),
)  # fmt: skip


class NamedInputs:
    """A compiled graph that knows where its inputs come from: expressions of `L` (local variables) and `G` (global ones)."""

    def __init__(self, gm: fx.GraphModule) -> None:
        reason = getattr(gm, "compile_subgraph_reason", None)
        self.is_whole = reason is None or not reason.graph_break
        placeholders = gm.graph.find_nodes(op="placeholder")
        self.names = [name_of(node) for node in placeholders]
        self.returned = {name_of(node) for node in placeholders if not _is_computed_with(node)}
        self.function: Callable[..., Any]

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


def keeping_names(backend: Callable[..., Any]) -> Callable[..., Any]:
    """A backend of `torch.compile` whose graphs are `NamedInputs`."""

    def compile(gm: fx.GraphModule, example_inputs: list[Any]) -> NamedInputs:
        made = NamedInputs(gm)  # the backend may rewrite it
        made.function = backend(gm, example_inputs)
        return made

    return compile


def name_of(placeholder: fx.Node) -> str:
    return name_of_source(placeholder.meta["grapharg"].source)


def name_of_source(source: Any) -> str:
    """Dynamo's name for where a value comes from."""
    return source.name if isinstance(source.name, str) else source.name()


def plain_name(placeholder: fx.Node) -> str:
    """An input of a captured graph as a person would write it: `model[3].weight`."""
    return in_plain_words(name_of(placeholder)) if "grapharg" in placeholder.meta else placeholder.name


def in_plain_words(name: str) -> str:
    for expression, words in PLAIN_NAMES:
        name = re.sub(expression, words, name)
    return name


def _is_computed_with(node: fx.Node) -> bool:
    """Whether a tensor depends on it: not if it is a number that a layer counts up, and returned to be set again."""
    if isinstance(node.meta.get("example_value"), torch.Tensor):
        return True
    return any(user.op != "output" and _is_computed_with(user) for user in node.users)
