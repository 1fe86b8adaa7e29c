"""`torch.compile(model, backend="onelaunch")`: our patterns rewrite what Dynamo captured, and Inductor compiles the result.

PyTorch finds the backend through the entry point `torch_dynamo_backends`. Without a C++ compiler (on a CPU) or Triton (on a
GPU) Inductor cannot generate code: then the rewritten graph runs as PyTorch operations, and one log line says so.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

import torch._functorch.config
from torch import fx

from onelaunch.capture.named_inputs import plain_name
from onelaunch.capture.recorded_call import RecordedCall, is_fixed
from onelaunch.fuse.counters import take_counters
from onelaunch.fuse.graph import is_checkpointed_block, tensor_of
from onelaunch.fuse.memory import changed_and_used, memory_written_by, storages_of
from onelaunch.fuse.patterns import BY_NAME, rewrite

log = logging.getLogger("onelaunch")
# A language model whose logits are not stored has its peak of memory in its activations. Then Inductor's partitioner also
# recomputes long chains that it can fuse, such as norms and gates, in the backward pass: here with its options, not with
# `activation_memory_budget`, which recomputes attention and ops of ours too where such chains are not enough.
RECOMPUTED = {
    "ban_recompute_used_far_apart": False, "ban_recompute_long_fusible_chains": False,
    "ban_recompute_materialized_backward": False,
}  # fmt: skip
SAVES_MEMORY = ("linear_cross_entropy",)


def onelaunch(
    gm: fx.GraphModule, example_inputs: list[Any], *, mode: str | None = None, options: dict[str, Any] | None = None,
    patterns: Collection[str] = tuple(BY_NAME), forced: bool = False, recorded: bool = False, captured: bool = False,
) -> Callable[..., Any]:  # fmt: skip
    """Compile one captured graph. `mode` and `options` are those of `torch.compile` and go to Inductor.

    With `recorded`, a graph on CUDA whose results have no gradients runs as a CUDA graph (`RecordedCall`).
    captured: the caller records the calls in a CUDA graph of its own. Without a graph, the host's time counts.
    """
    tensors = [one for one in example_inputs if isinstance(one, torch.Tensor)]
    differentiated = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    on_cuda = any(tensor.is_cuda for tensor in tensors)
    may_record = recorded and on_cuda and not differentiated and not changes_inputs(gm.graph, example_inputs)
    in_graph = captured or may_record or mode in ("reduce-overhead", "max-autotune")
    in_graph |= bool((options or {}).get("triton.cudagraphs"))
    if differentiated:
        for node in changed_and_used(gm.graph):
            name = plain_name(node)
            _log_once(
                f"the program changes {name} in place and then computes with it: torch.compile may get the gradients wrong; "
                "pass verify=True to know, and compile=False if it does"
            )
    replaced = rewrite(gm, patterns, forced=forced, in_graph=in_graph)
    log.debug("%d matches replaced: %s", len(replaced), ", ".join(match.title for match in replaced))
    devices = {tensor.device.type for tensor in map(tensor_of, gm.graph.nodes) if tensor is not None}
    reason = next(filter(None, map(no_code_generator_reason, sorted(devices))), "")
    if reason:
        _log_once(f"{reason}: the model runs as PyTorch operations, without generated code")
        if any(map(is_checkpointed_block, gm.graph.nodes)):
            # Run as it is, the block would draw other random numbers when it is recomputed.
            return cast(Callable[..., Any], torch._dynamo.lookup_backend("aot_eager")(gm, example_inputs))
        return gm.forward
    saves_memory = any(match.pattern.name in SAVES_MEMORY for match in replaced)
    with_counters = take_counters(gm)
    with torch._functorch.config.patch(RECOMPUTED if saves_memory else {}):
        function = with_counters(_inductor(gm, example_inputs, mode, options or {}))
    return RecordedCall(function) if may_record else function


def _inductor(
    gm: fx.GraphModule, example_inputs: list[Any], mode: str | None, options: dict[str, Any]
) -> Callable[..., Any]:
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    patches = {**(list_mode_options(mode) if mode and mode != "default" else {}), **options}
    return cast(Callable[..., Any], compile_fx(gm, example_inputs, config_patches=patches))


def changes_inputs(graph: fx.Graph, example_inputs: Sequence[Any]) -> bool:
    """Whether an operation writes to an input of the graph that is neither parameter nor buffer."""
    inputs = zip((node for node in graph.nodes if node.op == "placeholder"), example_inputs, strict=True)
    memory = storages_of(*(node for node, value in inputs if isinstance(value, torch.Tensor) and not is_fixed(value)))
    return any(memory_written_by(node) & memory for node in graph.nodes)


@functools.cache
def no_code_generator_reason(device: str) -> str:
    """Why Inductor cannot generate code for this kind of device; empty when it can."""
    if device == "cuda":
        return "" if importlib.util.find_spec("triton") is not None else "Triton is not installed"
    if device == "cpu":
        from torch._inductor.cpp_builder import get_cpp_compiler
        from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            return "there is no C++ compiler"
    return ""


def log_compiling(caller: str, what: str, remedy: str = "") -> None:
    """Say that `what` is compiled for the CPU, which takes a while even for a small model; nothing without a compiler."""
    if not no_code_generator_reason("cpu"):
        message = "%s: compiling %s for the CPU takes 10 s or more, minutes for a large model, once per kind of input%s"
        log.warning(message, caller, what, remedy)


@functools.cache
def _log_once(message: str) -> None:
    log.warning("%s", message)
