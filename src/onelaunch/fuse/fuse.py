"""`ol.fuse(model)`: a second view of a model in which neighbouring operations run as one kernel."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy as parameter_is_lazy

from onelaunch.errors import ArgumentTypeError, OnelaunchError, require_option, suggest
from onelaunch.fuse.arguments import Arguments
from onelaunch.fuse.decide import TIMES, decide
from onelaunch.fuse.placing import fusion_of, place_regions, regions
from onelaunch.fuse.region import Options
from onelaunch.fuse.twin import Model

log = logging.getLogger("onelaunch")
OPTIONS = ("eval_only", "only", "skip", "time")


def fuse(
    model: Model,
    *inputs: Any,
    eval_only: bool = False,
    only: str | Iterable[str] = (),
    skip: str | Iterable[str] = (),
    time: str = "auto",
    **named_inputs: Any,
) -> Model:
    """`model` with its chains of operations fused: a new module of the same class over the same parameters and buffers.

    With example inputs, by position or by the names that forward has for them, a chain is fused only where that pays at their
    size: on a CUDA device this is measured once and kept, elsewhere it is predicted. What is measured is the `time` of the
    "device", for a model that will run as a CUDA graph or on a faster host, or that a "program" sees, launching included;
    "auto" takes the one this model waits for here. `only` and `skip` name modules, which stand for all inside them. A model in
    which nothing can be fused comes back as it is, and a log message says why.
    """
    check_model(model)
    require_option("time", time, TIMES)
    check_names(model, named_inputs, OPTIONS)
    if not isinstance(eval_only, bool):
        raise OnelaunchError(f"eval_only={eval_only!r} must be True or False")
    options = Options(eval_only, _names("only", only, model), _names("skip", skip, model))
    known = fusion_of(model)
    if known is not None and options in (known.options, Options()):
        return model
    if is_lazy(model):
        log.warning("fuse: %s has parameters that are not initialised; call it once, then fuse it", _kind(model))
        return model
    sized = bool(inputs or named_inputs)
    example = Arguments.of(inputs, named_inputs) if sized else None
    fused, fusion = place_regions(model, options, sized=sized, example=example)
    found = regions(fused)
    if sized and found:
        decide(fused, inputs, time, named_inputs)
    if any(plan.fused for region in found for plan in region.plans):
        return fused
    reasons = [chain.reason for region in found for plan in region.plans for chain in plan.chains if chain.reason]
    reasons += [*fusion.notes, "no chain of operations that can be one was found"]
    log.warning("fuse: nothing to fuse in %s: %s", _kind(model), reasons[0])
    return model


def _kind(model: nn.Module) -> str:
    return type(model).__name__


def check_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"model is a {type(model).__name__}: pass a torch.nn.Module")
    if not hasattr(model, "_modules"):
        raise ArgumentTypeError(
            f"model is a {_kind(model)} that is no module yet: call super().__init__() in its __init__"
        )


def check_names(model: nn.Module, named_inputs: dict[str, Any], options: Iterable[str]) -> None:
    """That inputs passed by name are ones that forward names: any other is an option written wrong."""
    if not named_inputs:
        return
    try:
        signature = inspect.signature(model.forward)
    except ValueError:  # a scripted forward has none
        return
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    known = [one.name for one in signature.parameters.values() if one.kind in by_name]
    for name in named_inputs:
        if name not in known:
            raise ArgumentTypeError(
                f"{name} is neither an option nor an input that {_kind(model)}.forward names: pass {', '.join(options)}, or"
                f" an input by its name{suggest(name, (*options, *known))}"
            )


def is_lazy(model: nn.Module) -> bool:
    return any(parameter_is_lazy(parameter) for parameter in model.parameters())


def _names(argument: str, names: str | Iterable[str], model: nn.Module) -> tuple[str, ...]:
    if not isinstance(names, Iterable):
        raise ArgumentTypeError(f"{argument} is a {type(names).__name__}: pass a module's name, or several in a list")
    names = (names,) if isinstance(names, str) else tuple(names)
    known = [path for path, _ in model.named_modules(remove_duplicate=False)]
    for name in names:
        if name not in known:
            raise OnelaunchError(
                f"{argument}={name!r} is not a module of {_kind(model)}: pass a name that named_modules() gives"
                f"{suggest(name, known)}"
            )
    return names
