"""Runs the graph engine kernel by kernel, in Triton's interpreter where there is no GPU, beside the eager engine."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import torch
from torch import nn

import onelaunch as ol
from onelaunch.engines.contract import Segment
from onelaunch.train.history import History
from onelaunch.train.inputs import make_run
from tests.reference import ACTIVATIONS, assert_same_weights

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Silent:
    """A Monitor nobody listens to; stops after so many reports."""

    def __init__(self, reports: int = 10**9) -> None:
        self.left = reports

    @property
    def stop(self) -> bool:
        return self.left <= 0

    def report(self, step: int, loss: float, correct: int | None) -> None:
        self.left -= 1


def network(widths: list[int], activation: str | None, p: float = 0.0, *, bias: bool = True) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(widths[:-1]):
        layers.append(nn.Linear(inputs, outputs, bias=bias))
        layers += [ACTIVATIONS[activation]()] if activation else []
        layers += [nn.Dropout(p)] if p else []
    return nn.Sequential(*layers, nn.Linear(widths[-2], widths[-1], bias=bias)).to(DEVICE)


def data(widths: list[int], loss: str, rows: int = 50, *, images: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randint(256, (rows, widths[0]), dtype=torch.uint8) if images else torch.randn(rows, widths[0])
    y = torch.randint(widths[-1], (rows,)) if loss == "cross_entropy" else torch.rand(rows, widths[-1])
    return x.to(DEVICE), y.to(DEVICE)


def session(model: nn.Module, x: torch.Tensor, y: torch.Tensor, options: dict[str, Any], **more: Any) -> Any:
    """A session that launches kernel by kernel; `more`: validation, state."""
    from onelaunch.engines.graph.session import GraphSession

    run = make_run(model, x, y, more.get("validation"), {"precision": "fp32", **options})
    return GraphSession(run, more.get("state", {}), capture=False)


def assert_follows_eager(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, options: dict[str, Any], *, losses: float, weights: float
) -> None:
    """Same losses, right predictions, validation and weights; `losses` and `weights` are tolerances."""
    twin = copy.deepcopy(model)
    check = (x[:13], y[:13])
    history = ol.fit(twin, x, y, engine="eager", validation=check, progress=False, **options)
    graph = session(model, x, y, options, validation=check)
    segments: list[Segment] = list(graph.segments(0, Silent()))
    graph.close()
    got = torch.cat([segment.losses for segment in segments])
    torch.testing.assert_close(got, torch.tensor(history.losses), rtol=losses, atol=losses)
    assert_same_weights(model, twin, weights)
    _assert_same_metrics(segments, history, losses)


def _assert_same_metrics(segments: list[Segment], history: History, tolerance: float) -> None:
    for segment, record in zip(segments, history.epochs, strict=True):
        assert segment.validation is not None
        assert abs(segment.validation.loss - record["validation"]["loss"]) <= tolerance * abs(segment.validation.loss)
        if tolerance < 1e-4:  # elsewhere rounding may turn a prediction
            assert segment.validation.accuracy == record["validation"]["accuracy"]
            if segment.correct is not None:
                rows = record["step"] - segment.first_step
                assert rows == len(segment.losses)
