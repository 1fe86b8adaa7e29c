"""`torch.compile(model, backend="onelaunch")`: the same fusions on the graphs that dynamo captures.

Found by torch through the entry point `torch_dynamo_backends`. The graph runs as it is, without a code generator behind it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from onelaunch.fuse.chains import Chain, find_chains
from onelaunch.fuse.costs import Spec
from onelaunch.fuse.decide import judge
from onelaunch.fuse.record import step_of
from onelaunch.fuse.rewrite import rewrite
from onelaunch.fuse.roofline import device_model
from onelaunch.fuse.tracing import Trace
from onelaunch.fuse.verdict import without_sizes


def onelaunch(gm: fx.GraphModule, example_inputs: list[Any], **settings: Any) -> Callable[..., Any]:
    """Fuses the chains of `gm` that pay at the sizes it was captured with. `settings` are torch.compile's for inductor."""
    if given := ", ".join(f"{name}={value!r}" for name, value in settings.items()):
        warnings.warn(f"backend='onelaunch' has no use for {given}: they are inductor's", stacklevel=2)
    chains = find_chains(Trace(gm.graph, gm, {}, {}))
    rewrite(gm.graph, [chain for chain in chains if chain.reason is None and _pays(chain)])
    gm.recompile()
    return gm.forward


def _pays(chain: Chain) -> bool:
    values = [fx.node.map_arg(operation.arguments, _value) for operation in chain.operations]
    results = [_value(node) for node in chain.nodes]
    tensors = [value for arguments in values for value in arguments.values() if isinstance(value, Spec)]
    if not all(isinstance(result, Spec) for result in results) or any(
        None in one.shape for one in (*tensors, *results)
    ):
        return without_sizes(chain) is None
    known = zip(chain.operations, values, results, strict=True)
    steps = [step_of(replace(operation, arguments=arguments), result) for operation, arguments, result in known]
    return judge(steps, device_model(chain.nodes[-1].meta["example_value"].device)).fused


def _value(node: fx.Node) -> Any:
    """What a node gave when the graph was captured, without symbols: to decide with one would bind the graph to its value."""
    value = node.meta.get("example_value")
    if isinstance(value, torch.Tensor):
        return Spec(tuple(map(_hint, value.shape)), value.dtype, value.requires_grad)
    return _hint(value)


def _hint(value: Any) -> Any:
    """The number behind a symbolic one; None where only a run of the graph knows it."""
    return value.node.hint if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) else value
