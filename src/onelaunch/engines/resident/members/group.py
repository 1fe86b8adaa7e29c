"""What the members of one launch have in common: the settings of the code that trains all of them, or why there are none."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from onelaunch.engines.contract import Run
from onelaunch.engines.resident.plan.settings import MAX_DROPOUTS, MIN_EPS, Settings
from onelaunch.engines.resident.plan.stages import Stage, dropouts_of, stages_of
from onelaunch.engines.stages import UnsupportedNetworkError
from onelaunch.run.network import Dropout

ANY_P = 0.5  # of a dropout in the settings, where the members' probabilities are in their parameters
SAME = {  # fields of Spec that the code depends on
    "precision": "compiled_precision", "optimizer": "optimizer", "nesterov": "nesterov", "schedule": "schedule", "loss": "loss"
}  # fmt: skip


def members_settings(runs: Sequence[Run], *, uint8_rows: bool) -> Settings:
    """The settings of code that trains all of `runs`; UnsupportedNetworkError with the reason where there is none."""
    if reason := _difference(runs):
        raise UnsupportedNetworkError(reason)
    first, specs = runs[0].spec, [run.spec for run in runs]
    stages = _stages(runs)
    if (count := len(dropouts_of(stages))) > MAX_DROPOUTS:
        raise UnsupportedNetworkError(
            f"the model has {count} dropout layers, {MAX_DROPOUTS} at most can differ by member"
        )
    return Settings(
        stages=stages, batch=min(first.batch_size, first.rows), rows=max(spec.rows for spec in specs),
        precision=first.compiled_precision, optimizer=first.optimizer, momentum=any(spec.momentum > 0 for spec in specs),
        nesterov=first.nesterov, weight_decay=any(spec.weight_decay > 0 for spec in specs), schedule=first.schedule,
        loss=first.loss, label_smoothing=any(spec.label_smoothing > 0 for spec in specs), uint8_rows=uint8_rows,
        validates=runs[0].validation is not None,
        weighted=any(run.weights is not None for run in runs), tiny_eps=any(spec.eps < MIN_EPS for spec in specs),
        members=True,
    )  # fmt: skip


def _difference(runs: Sequence[Run]) -> str:
    """What keeps the runs from being trained by the same code; empty if nothing does."""
    for name, field in SAME.items():
        found = {str(getattr(run.spec, field)) for run in runs}
        if len(found) > 1:
            return f"the members differ in {name} ({', '.join(sorted(found))})"
    if len({min(run.spec.batch_size, run.spec.rows) for run in runs}) > 1:
        return "the members differ in their batch size"
    if len({run.validation is None for run in runs}) > 1:
        return "some members have validation rows and some have none"
    if len({run.device for run in runs}) > 1:
        return "the members are on different devices"
    if len({_shape(run) for run in runs}) > 1:
        return "the members differ in their network"
    return ""


def _shape(run: Run) -> tuple[Stage, ...]:
    """The stages without the probabilities of dropout."""
    return tuple(_with_p(stage, 0.0) for stage in stages_of(run.network)) if run.network else ()


def _with_p(stage: Stage, p: float) -> Stage:
    parts = (dataclasses.replace(part, p=p) if isinstance(part, Dropout) else part for part in stage.chain)
    return Stage(stage.linear, tuple(parts))


def _stages(runs: Sequence[Run]) -> tuple[Stage, ...]:
    """The common stages. A dropout that no member uses keeps p = 0 and is left out of the code."""
    networks = {run.network for run in runs}
    drops = any(part.p > 0 for network in networks if network for part in dropouts_of(stages_of(network)))
    return tuple(_with_p(stage, ANY_P if drops else 0.0) for stage in _shape(runs[0]))


def same_tensor(tensor: torch.Tensor) -> tuple[object, ...]:
    """A key that is equal for tensors that are the same memory, read the same way."""
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype
