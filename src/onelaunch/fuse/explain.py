"""`ol.explain(model, *inputs)`: what `ol.fuse` does to a model at these sizes, and why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from onelaunch.errors import OnelaunchError, require_option
from onelaunch.fuse.arguments import Arguments
from onelaunch.fuse.costs import Step, Work
from onelaunch.fuse.decide import TIMES, Decision, counts_host, decision_on, device_of, seconds_apart
from onelaunch.fuse.explanation import Explanation, Group, OperationCost
from onelaunch.fuse.fuse import check_model, check_names, is_lazy
from onelaunch.fuse.placing import fusion_of, make_plans, place_regions
from onelaunch.fuse.put_back import buffers_put_back
from onelaunch.fuse.record import Found, Record, record
from onelaunch.fuse.region import Options
from onelaunch.fuse.resources import KernelResources, resources_of
from onelaunch.fuse.roofline import DeviceModel, device_model, named_device
from onelaunch.fuse.timing import contenders
from onelaunch.fuse.twin import sealed


def explain(
    model: nn.Module, *inputs: Any, device: str | None = None, time: str = "auto", **named_inputs: Any
) -> Explanation:
    """Runs the model once on these inputs, in the mode it is in, and says for each chain what is done with it and why.

    Times are predicted for the device the inputs are on, an H200 where that is a CPU; `device` names another ("A100"). On a
    CUDA device, and unless another is named, they are measured too; `time` is that of `fuse`.
    """
    check_model(model)
    given, model = model, getattr(model, "_orig_mod", model)  # what torch.compile was given
    if getattr(model.forward, "__name__", "") == "_forward_unimplemented":
        raise OnelaunchError(
            f"model is a {type(model).__name__}, which has no forward: pass a module that can be called"
        )
    if sealed(model) == "compiled":
        raise OnelaunchError(f"model is a {type(model).__name__} that was compiled: pass it before model.compile()")
    if is_lazy(model):
        raise OnelaunchError(f"model is a {type(model).__name__} with parameters not initialised: call it once before")
    require_option("time", time, TIMES)
    check_names(model, named_inputs, ("device", "time"))
    if not inputs and not named_inputs:
        raise OnelaunchError("inputs is empty: pass example inputs, as in ol.explain(model, x)")
    roof = None if device is None else named_device(device)
    known = fusion_of(model)
    example, options = Arguments.of(inputs, named_inputs), known.options if known else Options()
    watched, fusion = place_regions(model, options, sized=True, everywhere=True, example=example)
    if known is not None:  # a fused model: what was decided then is what it does
        fusion.sized, fusion.verdicts = known.sized, known.verdicts
        make_plans(watched, (model.training,))
    run = record(watched, inputs, named_inputs)
    where = device_of(model, (*inputs, *named_inputs.values()))
    by_host = where.type == "cuda" and roof is None and counts_host(time, watched, run, inputs, named_inputs)
    decisions = [decision_on(one, run, where, roof, by_host) for one in run.chains]
    if known is not None:  # fused without sizes: what is fused is, and the times say what that is worth here
        decisions = [None if decision is None else replace(decision, fused=True) for decision in decisions]
    groups = [_group(one, run, decision, where) for one, decision in zip(run.chains, decisions, strict=True)]
    shown = roof or device_model(where)
    operations = [_operation(step, shown) for step in run.steps]
    notes = ["it is compiled, and fuse leaves that as it is: fuse first, compile then"] if given is not model else []
    notes += run.notes + [note for note in dict.fromkeys(fusion.notes) if "is not one graph" in note]
    kept = [group for group in groups if group is not None]
    return Explanation(type(model).__name__, model.training, shown, operations, kept, notes)


def _group(one: Found, run: Record, decision: Decision | None, where: torch.device) -> Group | None:
    steps = [run.steps[position] for position in one.steps]
    if not steps:
        return None
    before = Work(
        *(sum((getattr(s, part) for s in steps[1:]), getattr(steps[0], part)) for part in ("forward", "backward"))
    )
    labels = tuple(step.label for step in steps)
    dtype = steps[0].output.dtype
    if decision is None:
        reason = one.chain.reason or "the run did not pass all of it"
        return Group(one.chain.name, tuple(one.steps), labels, False, reason, before, before, dtype)
    return Group(
        one.chain.name, tuple(one.steps), labels, decision.fused, decision.reason, before,
        decision.after if decision.fused else before, dtype, decision.predicted, decision.measured, decision.memory,
        _kernels(one, steps, where) if decision.measured and decision.fused else (),
    )  # fmt: skip


def _kernels(one: Found, steps: list[Step], where: torch.device) -> tuple[KernelResources, ...]:
    _, fused_run = contenders(one, steps, where)
    with buffers_put_back(one.region.module):
        return tuple(resources_of(fused_run))


def _operation(step: Step, roof: DeviceModel) -> OperationCost:
    return OperationCost(
        step.name, step.label, step.work, seconds_apart(roof, step), step.output.dtype, step.output.shape, step.sources
    )
