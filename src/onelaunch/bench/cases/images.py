"""Convolutional networks by `fit` on the compiled engine, against PyTorch loops and steps captured by hand as a CUDA graph.

All contenders keep the images on the GPU, gather each batch there, and keep fp32 master weights. A run's first epoch, in which
the model is compiled, is not counted; nor is a peer's first call.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import fmean

import torch
import torch.nn.functional as F
from torch import nn

from onelaunch.bench.case import Trial, case
from onelaunch.bench.cases.train import TOLERANCE, train
from onelaunch.bench.contenders import COMPILED, EAGER
from onelaunch.bench.measure import cuda_device
from onelaunch.bench.model_zoo import imported
from onelaunch.bench.peers_torch import Captured, loop, reference_losses, worst_relative
from onelaunch.bench.step_peers import COMPILED_GRAPH, GRAPH, timed
from onelaunch.engines.contract import Run
from onelaunch.train.inputs import make_run

ROWS, BATCH, SAMPLES = 61_440, 128, 5
LOOP_STEPS, CHECKED_STEPS = 100, 10


class SmallCnn(nn.Module):
    """Two convolutions and two linear layers, for images of 28 x 28."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 32, 3), nn.Conv2d(32, 64, 3)
        self.hidden, self.output = nn.Linear(64 * 12 * 12, 128), nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.second(F.relu(self.first(x)))), 2)
        return self.output(F.relu(self.hidden(x.flatten(1))))


def resnet18() -> nn.Module:
    """torchvision's ResNet-18 with the usual first layer for images of 32 x 32."""
    model: nn.Module = imported("torchvision.models").resnet18(num_classes=10)
    model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
    return model


@dataclass(frozen=True)
class Images:
    make: Callable[[], nn.Module]
    shape: tuple[int, int, int]
    precision: str
    epochs: int  # of ROWS rows, counted per call of ours

    def run(self, rows: int, **length: int) -> Run:
        torch.manual_seed(0)
        device = cuda_device()
        x = torch.rand(rows, *self.shape, device=device)
        y = (x.flatten(1) - 0.5) @ torch.randn(x[0].numel(), 10, device=device)
        options = {
            **length, "batch_size": BATCH, "optimizer": "adam", "lr": 1e-4, "precision": self.precision, "engine": "compiled"
        }  # fmt: skip
        return make_run(self.make().to(device), x, y.argmax(1), None, options)

    def check(self) -> None:
        """The first losses are as near to a float64 loop's as those of eager PyTorch, or within the usual tolerance."""
        run = self.run(CHECKED_STEPS * BATCH, steps=CHECKED_STEPS)
        exact = reference_losses(run, CHECKED_STEPS)
        plain = replace(run, model=copy.deepcopy(run.model), spec=replace(run.spec, engine="eager"))
        error, usual = (worst_relative(train(one)[1].losses, exact) for one in (run, plain))
        bound = max(2 * usual, TOLERANCE[self.precision])
        assert error <= bound, f"losses differ from float64 by {error:.2g} relative, eager's by {usual:.2g}"


def _trial(images: Images) -> Trial:
    images.make()  # skips the case if a library is missing
    run = images.run(ROWS, epochs=1 + images.epochs)
    steps = ROWS // BATCH

    def ours() -> float:
        _, history, _ = train(run)
        return fmean(epoch["seconds"] for epoch in history.epochs[1:]) / steps

    return Trial(
        ours=ours, check=images.check,
        peers={
            EAGER: timed(lambda: loop(run), LOOP_STEPS, LOOP_STEPS),
            COMPILED: timed(lambda: loop(run, "default"), LOOP_STEPS, LOOP_STEPS),
            GRAPH: timed(lambda: Captured(run), steps, steps),
            COMPILED_GRAPH: timed(lambda: Captured(run, "default"), steps, steps),
        },
        cuda=True, self_timed=True, repeats=SAMPLES,
    )  # fmt: skip


_CNN = "two convolutions and two linear layers, 28 x 28 pixels"
for _name, _about, _images in (
    ("cnn/auto", f"{_CNN}, tf32", Images(SmallCnn, (1, 28, 28), "auto", 4)),
    ("cnn/bf16", f"{_CNN}, bf16", Images(SmallCnn, (1, 28, 28), "bf16", 4)),
    ("resnet-18/bf16", "ResNet-18, 3 x 32 x 32 pixels, bf16", Images(resnet18, (3, 32, 32), "bf16", 1)),
):
    _whole = f"{_about}, batch {BATCH}, Adam: one step of a long run"
    case(f"train/{_name}", "train", _whole)(functools.partial(_trial, _images))
