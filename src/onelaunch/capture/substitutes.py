"""What Dynamo is told before it captures anything. This holds for all of `torch.compile` in the process.

Functions of PyTorch at which it ends a graph are given in a form that it can capture; what a model computes is the same.
`nn.TransformerEncoder` and `nn.TransformerDecoder` compare a given mask with the causal one on the host, to choose a kernel.
That ends the graph, leaves the layers uncompiled and cannot be recorded. Inside a captured graph the mask is used as it is,
in the model's type: where it is causal, the layers would have ignored its type.

Hooks of layers are guarded, and whether a parameter is frozen, so that a change counts.

A function that is inlined keeps its own global variables. Dynamo reads them from the module in `sys.modules` that has the name
of the function's module. It may be another one, as of a second file of that name, or none, as for code run by `runpy`.
"""

from __future__ import annotations

import functools
import inspect
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import transformer


def _detect_is_causal_mask(mask: torch.Tensor | None, is_causal: bool | None = None, size: int | None = None) -> bool:
    if is_causal is None and mask is not None and mask.requires_grad:  # a causal one has no gradients
        length = mask.size(-2) if size is None else size
        causal = nn.Transformer.generate_square_subsequent_mask(length, device=mask.device, dtype=mask.dtype)
        return mask.shape == causal.shape and bool((mask == causal).all())
    return is_causal is True


def _canonical_mask(
    mask: torch.Tensor | None, mask_name: str, other_type: torch.dtype | None, other_name: str,
    target_type: torch.dtype, check_other: bool = True,
) -> torch.Tensor | None:  # fmt: skip
    if mask is None or torch.is_floating_point(mask):
        return None if mask is None else mask.to(target_type)
    if mask.dtype != torch.bool:
        raise AssertionError(f"only bool and floating types of {mask_name} are supported")
    return torch.zeros_like(mask, dtype=target_type).masked_fill(mask, float("-inf"))


# (module, function): private ones, and where a version of PyTorch lacks or changes one, none is substituted.
SUBSTITUTES: tuple[tuple[Any, Any], ...] = ((transformer, _detect_is_causal_mask), (F, _canonical_mask))


# Settings of Dynamo's that leave guards out, which make the check of a 12-layer transformer faster.
GUARDED = ("skip_nnmodule_hook_guards", "skip_tensor_guards_with_matching_dict_tags")


@functools.cache
def substitute() -> None:
    """Tell Dynamo, which this imports, once per process and before it captures."""
    for name in GUARDED:  # the default: what is set holds for one thread and context, and takes 4 to 60 µs per call
        torch._dynamo.config._config[name].default = False  # type: ignore[attr-defined]
    _keep_own_variables()
    originals: list[Any] = [getattr(module, function.__name__, None) for module, function in SUBSTITUTES]
    pairs = [(one, function) for one, (_, function) in zip(originals, SUBSTITUTES, strict=True)]
    if all(one is not None and _parameters(one) == _parameters(function) for one, function in pairs):
        for one, function in pairs:
            torch.compiler.substitute_in_graph(one, skip_signature_check=True)(function)


def _parameters(function: Any) -> list[str]:
    return [*inspect.signature(function).parameters]


def _keep_own_variables() -> None:
    from torch._dynamo.source import DictGetItemSource, GlobalSource
    from torch._dynamo.symbolic_convert import InliningInstructionTranslator as Inlined
    from torch._dynamo.variables.builder import VariableBuilder

    by_name = Inlined.get_globals_source_and_value

    def get_globals_source_and_value(self: Any, name: str) -> tuple[Any, Any, Any]:
        variables = self.f_globals
        module_name = variables.get("__name__", "namedtuple_")
        has_no_module = module_name.startswith("namedtuple_") or "torch_package" in module_name  # Dynamo knows such
        if has_no_module or vars(sys.modules.get(module_name, object)) is variables:
            return by_name(self, name)
        source = GlobalSource(self.output.install_global_by_id("___variables", variables))
        return variables, VariableBuilder(self, source)(variables), DictGetItemSource(source, name)

    Inlined.get_globals_source_and_value = get_globals_source_and_value  # type: ignore[method-assign]
