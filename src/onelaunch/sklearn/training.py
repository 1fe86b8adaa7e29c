"""Trains the networks of one estimator, or of all estimators of a search, together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import nn

from onelaunch.engines.contract import Run
from onelaunch.errors import DivergedError, UnsupportedError
from onelaunch.run.spec import Spec
from onelaunch.sweep.active import Job, Switch
from onelaunch.sweep.trainer import train
from onelaunch.train.fit import fit
from onelaunch.train.history import History
from onelaunch.train.inputs import make_run
from onelaunch.train.interrupts import on_interrupt


@dataclass(frozen=True)
class Prepared:
    """The rows of a fit as networks take them: float32 features, class numbers or scaled targets, weights."""

    x: np.ndarray
    y: np.ndarray
    weight: np.ndarray | None
    outputs: int
    loss: str


@dataclass(frozen=True)
class Network:
    """A network to train, with the rows and the arguments of its `ol.fit`."""

    model: nn.Sequential
    x: np.ndarray
    y: np.ndarray
    weight: np.ndarray | None
    options: dict[str, Any]  # of `fit`, and `validation` if a fraction of the rows is held out

    @property
    def sample_weight(self) -> np.ndarray | None:
        return None if self.weight is None else self.weight.astype(np.float32)


class NetworkRuns:
    """The Runs of networks. Those on the same rows share tensors, and those of the same layers the parsed network."""

    def __init__(self, threads: int | None = None) -> None:
        """`threads`: as in Run."""
        self._threads = threads
        self._bases: dict[Any, Run] = {}
        self._kept: list[Any] = []  # arrays, whose identity is part of a key

    def run(self, network: Network) -> Run:
        return dataclasses.replace(self._run(network), threads=self._threads)

    def _run(self, network: Network) -> Run:
        options = dict(network.options)
        validation = options.pop("validation", None)
        if validation is not None:  # the seed chooses the rows: every network has its own
            return make_run(
                network.model, network.x, network.y, validation, options, sample_weight=network.sample_weight
            )
        key = (
            id(network.x),
            id(network.y),
            id(network.weight),
            str(network.model),
            options["batch_size"],
            options["engine"],
            options["precision"],
        )
        base = self._bases.get(key)
        if base is None:
            base = self._bases[key] = make_run(
                network.model, network.x, network.y, None, options, sample_weight=network.sample_weight
            )
            self._kept += [network.x, network.y, network.weight]
            return base
        spec = Spec(rows=base.spec.rows, **options)
        return dataclasses.replace(base, spec=spec, model=network.model)


def train_networks(networks: Sequence[Network], *, verbose: bool) -> list[History]:
    """Train all networks and return their histories. Raises DivergedError if one diverges, KeyboardInterrupt on Ctrl-C."""
    if len(networks) == 1 or verbose:
        return [
            fit(each.model, each.x, each.y, sample_weight=each.sample_weight, progress=verbose, **each.options)
            for each in networks
        ]
    runs = NetworkRuns()
    switch = Switch()
    jobs = [Job(number, lambda each=each: runs.run(each)) for number, each in enumerate(networks)]  # type: ignore[misc]
    with on_interrupt(switch.interrupt):
        found = {}
        for outcome in train(jobs, switch):
            if outcome.run is None:
                raise UnsupportedError(outcome.error)
            if outcome.error:
                raise DivergedError(outcome.error, len(outcome.history.losses))
            found[outcome.index] = outcome.history
    if switch.stop:
        raise KeyboardInterrupt
    return [found[number] for number in range(len(networks))]
