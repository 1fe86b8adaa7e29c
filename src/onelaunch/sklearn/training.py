"""Trains the networks of one estimator, or of all estimators of a search, together."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import nn

from onelaunch.engines.contract import Run
from onelaunch.errors import DivergedError, UnsupportedError
from onelaunch.run.early_stopping import EarlyStopping
from onelaunch.run.spec import Spec
from onelaunch.sklearn.convergence import Convergence, EpochRules
from onelaunch.sklearn.stepwise import StepwiseEngine
from onelaunch.sweep.active import Job, Switch
from onelaunch.sweep.trainer import train
from onelaunch.train.history import History
from onelaunch.train.inputs import make_run
from onelaunch.train.interrupts import on_interrupt
from onelaunch.train.loop import drive
from onelaunch.train.predict import remember_task
from onelaunch.train.progress import Progress


@dataclass(frozen=True)
class Prepared:
    """The rows of a fit as networks take them: float32 features, class numbers or scaled targets, weights."""

    x: np.ndarray
    y: np.ndarray
    weight: np.ndarray | None
    outputs: int
    loss: str
    total_weight: float


@dataclass(frozen=True)
class Network:
    """A network to train, with the rows and the arguments of its `ol.fit`."""

    model: nn.Sequential
    x: np.ndarray
    y: np.ndarray
    weight: np.ndarray | None
    options: dict[str, Any]  # of `fit`, and `validation`: the fraction of the rows to hold out, or those rows
    convergence: Convergence = field(default_factory=Convergence)
    shuffle: bool = True

    def without(self, rows: np.ndarray) -> Network:
        """The network with all rows but these to train on; in regression it keeps its best epoch on these."""
        if not len(rows):
            return self
        options = dict(self.options)
        if options["loss"] == "mse" and "validation" not in options:
            options["validation"] = (self.x[rows], self.y[rows])
            options["early_stopping"] = EarlyStopping(options["epochs"])
        kept = np.ones(len(self.x), bool)
        kept[rows] = False
        weight = None if self.weight is None else self.weight[kept]
        return dataclasses.replace(self, x=self.x[kept], y=self.y[kept], weight=weight, options=options)

    @property
    def trains_alone(self) -> bool:
        """Whether the losses or the order of the rows decide on something that networks in one launch cannot."""
        return not self.shuffle or self.convergence.steers_rate or self.convergence.ends_training

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
    if len(networks) == 1 or verbose or any(network.trains_alone for network in networks):
        return [_train_alone(network, verbose=verbose) for network in networks]
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


def _train_alone(network: Network, *, verbose: bool) -> History:
    """`ol.fit` of one network, with its rules of convergence."""
    started = time.perf_counter()
    options = dict(network.options)
    validation = options.pop("validation", None)
    run = make_run(network.model, network.x, network.y, validation, options, sample_weight=network.sample_weight)
    remember_task(run, flat=network.y.ndim == 1)
    rules, chosen = EpochRules(network.convergence, run.spec.rows, verbose=verbose), None
    if not network.shuffle or network.convergence.steers_rate:
        engine = StepwiseEngine(network.convergence, shuffle=network.shuffle)
        chosen = (engine, engine.reason)
    return drive(
        run, checkpoint=None, resume=False, progress=Progress(), listener=rules, started=started, chosen=chosen
    )
