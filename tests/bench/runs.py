"""Runs and contenders for the tests of comparisons."""

from __future__ import annotations

import numpy as np

from onelaunch.bench.contenders import Trained
from onelaunch.integers import round_up
from onelaunch.train.inputs import make_run
from onelaunch.train.mlp import mlp


def make(seed: int = 0, hidden: int = 16, dropout: float = 0.0, **options):
    """A run over 300 rows: 30 steps, the last of each epoch with a partial batch."""
    random = np.random.default_rng(0)
    y = np.arange(330) % 3
    x = random.normal(size=(330, 5)).astype(np.float32) + 2 * np.eye(5, dtype=np.float32)[y]
    settings = {"epochs": 3, "batch_size": 32, "optimizer": "adam", "lr": 1e-2, "seed": seed, **options}
    model = mlp([5, hidden, 3], dropout=dropout, seed=seed)
    return make_run(model, x[:300], y[:300], (x[300:], y[300:]), settings)


class Pretender:
    """Trains nothing and reports fixed times: `once` s per run and `step` s per step, in whole calls of `call` steps."""

    def __init__(self, once: float, step: float, call: int = 1) -> None:
        self.name, self.once, self.step, self.call = "pretender", once, step, call
        self.asked: list[int] = []

    def train(self, run):
        steps = round_up(run.spec.total_steps, self.call)
        self.asked.append(steps)
        return Trained(run.model, [1.0] * steps, [(steps, self.once + steps * self.step)])
