"""Training runs: `fit` against the loop a user would write in PyTorch."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional as F

from onelaunch.bench.case import Trial, case
from onelaunch.rng import permutation
from onelaunch.train import fit

STEPS, BATCH, ROWS, LR = 100, 32, 1024, 0.05
CHECKED_STEPS = 50


def _network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def _plain_loop(model: nn.Module, x: torch.Tensor, y: torch.Tensor, steps: int) -> list[float]:
    """The PyTorch loop that `fit` replaces, over the same rows in the same order."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    per_epoch = len(x) // BATCH
    losses = []
    for step in range(steps):
        if step % per_epoch == 0:
            order = permutation(len(x), 0, step // per_epoch)
        rows = order[step % per_epoch * BATCH :][:BATCH]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[rows]), y[rows])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _check() -> None:
    """Losses of `fit` against the plain loop, in float64, from the same fresh weights on fresh data."""
    x, y = torch.randn(ROWS, 64), torch.randint(10, (ROWS,))
    model = _network()
    reference = _plain_loop(copy.deepcopy(model).double(), x.double(), y, CHECKED_STEPS)
    history = fit(model, x, y, steps=CHECKED_STEPS, batch_size=BATCH, lr=LR, progress=False)
    torch.testing.assert_close(torch.tensor(history.losses), torch.tensor(reference), rtol=1e-5, atol=1e-6)


@case("train/64-32-10", "train", f"64-32-10, batch {BATCH}, SGD, {STEPS} steps a call, on the CPU")
def small_classifier() -> Trial:
    torch.manual_seed(0)
    x, y = torch.randn(ROWS, 64), torch.randint(10, (ROWS,))
    ours, eager, theirs = _network(), _network(), _network()
    return Trial(
        ours=lambda: fit(ours, x, y, steps=STEPS, batch_size=BATCH, lr=LR, progress=False),
        peers={
            "eager engine": lambda: fit(
                eager, x, y, steps=STEPS, batch_size=BATCH, lr=LR, engine="eager", progress=False
            ),
            "PyTorch loop": lambda: _plain_loop(theirs, x, y, STEPS),
        },
        check=_check,
        units=STEPS,
    )
