"""Runs the graph engine kernel by kernel, in Triton's interpreter where there is no GPU, beside the eager engine."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import torch
from torch import nn

import onelaunch as ol
from onelaunch.engines.contract import Segment
from onelaunch.engines.graph.plan import narrow, plan
from onelaunch.train.inputs import make_run
from tests.reference import ACTIVATIONS, assert_same_weights

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = ("small", "large", "narrow")  # of a step


class Silent:
    """A Monitor that ignores what is reported, and stops after `reports` reports."""

    def __init__(self, reports: int = 10**9) -> None:
        self.left = reports

    @property
    def stop(self) -> bool:
        return self.left <= 0

    def report(self, step: int, loss: float, correct: int | None) -> None:
        self.left -= 1


def use_shape(shape: str, monkeypatch: Any) -> None:
    """Plans steps of this shape at sizes that the interpreter can run, with fewer and larger programs."""
    from onelaunch.engines.graph.kernels import split_k_update

    monkeypatch.setattr(split_k_update, "WEIGHTS_PER_PROGRAM", 256)
    if shape == "large":
        monkeypatch.setattr(plan, "SMALL_BATCH", 0)
        monkeypatch.setattr(plan, "MIN_ROWS_PER_SPLIT", 8)
    if shape == "narrow":
        monkeypatch.setattr(narrow, "MIN_BATCH", 1)


def network(widths: list[int], activation: str | None, p: float = 0.0, *, bias: bool = True) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in pairwise(widths[:-1]):
        layers.append(nn.Linear(inputs, outputs, bias=bias))
        layers += [ACTIVATIONS[activation]()] if activation else []
        layers += [nn.Dropout(p)] if p else []
    return nn.Sequential(*layers, nn.Linear(widths[-2], widths[-1], bias=bias)).to(DEVICE)


def data(
    widths: list[int], loss: str, rows: int = 50, *, uint8_rows: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randint(256, (rows, widths[0]), dtype=torch.uint8) if uint8_rows else torch.randn(rows, widths[0])
    y = torch.randint(widths[-1], (rows,)) if loss == "cross_entropy" else torch.rand(rows, widths[-1])
    return x.to(DEVICE), y.to(DEVICE)


def session(model: nn.Module, x: torch.Tensor, y: torch.Tensor, options: dict[str, Any], **more: Any) -> Any:
    """A session that launches kernel by kernel; `more`: validation, state, sample_weight."""
    from onelaunch.engines.graph.session import GraphSession

    settings = {"precision": "fp32", "optimizer": "sgd", **options}
    run = make_run(model, x, y, more.get("validation"), settings, sample_weight=more.get("sample_weight"))
    return GraphSession(run, more.get("state", {}), capture=False)


def train(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, options: dict[str, Any], **more: Any
) -> tuple[torch.Tensor, list[Segment]]:
    """Trains to the end; the loss of every step, and the segments."""
    graph = session(model, x, y, options, **more)
    segments: list[Segment] = list(graph.segments(0, Silent()))
    graph.close()
    return torch.cat([segment.losses for segment in segments]), segments


def assert_follows_eager(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, options: dict[str, Any], *, losses: float, weights: float,
    validation: bool = True, twin: nn.Module | None = None,
) -> None:  # fmt: skip
    """Same losses, weights and, with `validation`, metrics; `losses` and `weights` are tolerances.

    `twin`, by default a copy of the model, is what the eager engine trains.
    """
    twin = twin or copy.deepcopy(model)
    held_out = (x[:13], y[:13]) if validation else None
    history = ol.fit(
        twin, x, y, engine="eager", validation=held_out, progress=False, **{"precision": "fp32", "optimizer": "sgd", **options}
    )  # fmt: skip
    got, segments = train(model, x, y, options, validation=held_out)
    torch.testing.assert_close(got, torch.tensor(history.losses), rtol=losses, atol=losses)
    assert_same_weights(model, twin, weights)
    for segment, record in zip(segments, history.epochs, strict=True):
        assert record["step"] - segment.first_step == len(segment.losses)
        if validation:
            assert segment.validation is not None
            gap = abs(segment.validation.loss - record["validation"]["loss"])
            assert gap <= losses * abs(segment.validation.loss)
            assert segment.validation.accuracy == record["validation"]["accuracy"]
