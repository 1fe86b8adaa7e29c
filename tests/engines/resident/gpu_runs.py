"""Runs of the resident engine on a GPU, in placements that tests choose."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

import onelaunch as ol
from onelaunch.engines.contract import Run
from tests.engines.graph.harness import DEVICE, Silent, network
from tests.reference import problem

PLACEMENTS: dict[str, dict[str, Any]] = {
    "one block": {"blocks": 1, "cluster": False, "by_rows": False},
    "cluster": {"blocks": 2, "cluster": True, "by_rows": False},
    "grid": {"blocks": 5, "cluster": False, "by_rows": False},
    "rows": {"blocks": 2, "cluster": True, "by_rows": True},
}


def rows_of(widths: list[int], loss: str = "cross_entropy", rows: int = 600, *, uint8_rows: bool = False) -> Any:
    """Rows and targets that can be learned, so that rounding does not drive two runs apart."""
    torch.manual_seed(3)
    x, y = problem(loss, rows, widths[0], widths[-1])
    if uint8_rows:
        x = (x * 40 + 128).clamp(0, 255).to(torch.uint8)
    return x.to(DEVICE), y.to(DEVICE)


def pair(widths: list[int], activation: str | None = "relu", p: float = 0.0, *, bias: bool = True) -> Any:
    """A model and a copy of it."""
    torch.manual_seed(4)
    model = network(widths, activation, p, bias=bias)
    return model, copy.deepcopy(model)


def fit(model: nn.Module, x: torch.Tensor, y: torch.Tensor, engine: str, **options: Any) -> Any:
    return ol.fit(
        model,
        x,
        y,
        engine=engine,
        progress=False,
        **{"steps": 200, "optimizer": "sgd", "lr": 0.05, "precision": "fp32", **options},
    )


def losses_of(session: Any) -> list[float]:
    try:
        return torch.cat([segment.losses for segment in session.segments(0, Silent())]).tolist()
    finally:
        session.close()


def placed(run: Run, placement: str | dict[str, Any], **more: Any) -> Any:
    """A session of the run in one of PLACEMENTS, or in the given one."""
    from onelaunch.device import chip_of
    from onelaunch.engines.resident.plan.placement import choose_plan
    from onelaunch.engines.resident.session import ResidentSession, settings_for

    forced = PLACEMENTS[placement] if isinstance(placement, str) else placement
    plan = choose_plan(settings_for(run, run.spec.compiled_precision), chip_of(run.device), **forced)
    return ResidentSession(run, {}, plan=plan, **more)
