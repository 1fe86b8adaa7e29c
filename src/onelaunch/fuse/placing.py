"""Where regions go: a twin of the model, with one in each module that owns a chain."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count

from torch import nn

from onelaunch.fuse.arguments import Arguments
from onelaunch.fuse.refused import RefusedError
from onelaunch.fuse.region import Fusion, Options, Plan, Region
from onelaunch.fuse.twin import Model, sealed, twin

# What the root of a fused model is marked with. Did its regions know the root, a copy of a part would take the whole along.
_FUSION = "_onelaunch_fusion"


def place_regions(
    model: Model, options: Options, sized: bool = False, everywhere: bool = False, example: Arguments | None = None
) -> tuple[Model, Fusion]:
    """The twin of `model`, with a region in each module that owns a chain in training or in evaluation mode.

    `sized`: example inputs will decide; `example` is the kind of call they make, which may pass what a forward can do without
    (`labels`). A chain that is not fused counts too if `everywhere`: a record then meets it.
    """
    try:
        fused = twin(model)
    except RefusedError as refusal:
        return model, Fusion(options, sized, notes=[f"the model is not one graph: {refusal}"])
    originals = set(map(id, model.modules()))
    for module in fused.modules():
        if id(module) not in originals:
            vars(module).pop(_FUSION, None)
            if isinstance(vars(module).get("forward"), Region):
                del module.forward  # the model held fused parts: their chains are found again, and perhaps longer ones
    fusion = Fusion(options, sized)
    if fused is not model:
        vars(fused)[_FUSION] = fusion
    shared = _registered_often(fused)
    found: dict[str, Region] = {}
    modes = (False,) if options.eval_only else (True, False)
    for mode in modes:
        with in_mode(fused, mode):
            for path, module in _open_modules(fused, fusion.notes):
                if path in found or not _has_forward(module, path):
                    continue
                region = Region(module, path, _below(shared, path), fusion)
                region.example = None if path else example
                plans = _likely_plans(region)
                fusion.notes += _notes(plans[0], path)
                if any(chain.owner == "" for plan in plans for chain in (plan.chains if everywhere else plan.fused)):
                    found[path] = region
    for region in found.values():
        region.module.forward = region
    make_plans(fused, modes)
    return fused, fusion


def _has_forward(module: nn.Module, path: str) -> bool:
    """Not so a list of modules, a single operation, or where somebody put a forward in the place of the class's."""
    own = type(module).forward is not nn.Module.forward and "forward" not in vars(module)
    return own and (not path or bool(module._modules))


def _open_modules(root: nn.Module, notes: list[str]) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a twin that are its own; those it shares as they are, and all inside them, are left out and noted."""
    closed: list[str] = []
    for path, module in root.named_modules():
        if any(path.startswith(f"{outer}.") for outer in closed):
            continue
        if sealed(module):
            closed.append(path)
            notes.append(f"{path or 'the model'} is not one graph: it is {sealed(module)}; fuse it before that")
            if not path:
                return
        else:
            yield path, module


def make_plans(fused: nn.Module, modes: Iterable[bool] = (True, False)) -> None:
    """Makes the plans for the likeliest calls of each region anew; `torch.compile` cannot make them on the way."""
    for region in regions(fused):
        region.plans = []
    for mode in modes:
        with in_mode(fused, mode):
            for region in regions(fused):
                _likely_plans(region)


def _likely_plans(region: Region) -> list[Plan]:
    """Of a call with what forward needs, and of the call that example inputs make, where that is another."""
    likeliest = _likeliest_call(region.module)
    return [region.make_plan(call) for call in dict.fromkeys((likeliest, region.example or likeliest))]


def _likeliest_call(module: nn.Module) -> Arguments:
    forward = type(module).forward
    arguments = Arguments.required_by(forward)
    named = [
        one.name
        for one in inspect.signature(forward).parameters.values()
        if one.kind is inspect.Parameter.KEYWORD_ONLY and one.default is inspect.Parameter.empty
    ]
    return replace(arguments, keywords=tuple(zip(named, count(len(arguments.positional)), strict=False)))


def _below(names: frozenset[str], path: str) -> frozenset[str]:
    prefix = f"{path}." if path else ""
    return frozenset(name.removeprefix(prefix) for name in names if name.startswith(prefix))


def _registered_often(root: nn.Module) -> frozenset[str]:
    """Paths of modules that the tree holds at more than one place."""
    named = list(root.named_modules(remove_duplicate=False))
    counts = Counter(id(module) for _, module in named)
    return frozenset(path for path, module in named if counts[id(module)] > 1)


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """All modules in training or evaluation mode, then each as it was."""
    before = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in before:
            module.training = training
        yield
    finally:
        for module, mode in before:
            module.training = mode


def regions(model: nn.Module) -> list[Region]:
    found = [vars(module).get("forward") for module in model.modules()]
    return [region for region in found if isinstance(region, Region)]


def fusion_of(model: nn.Module) -> Fusion | None:
    """What `fuse` knows about `model`, if `model` is what it returned."""
    return vars(model).get(_FUSION)


def _notes(plan: Plan, path: str) -> list[str]:
    """Why chains of a module are not fused, and why it was not traced."""
    if plan.refusal:
        return [f"{path or 'the model'} is not one graph: {plan.refusal}"]
    return [f"{chain.name}: {chain.reason}" for chain in plan.chains if chain.reason and chain.owner == ""]
