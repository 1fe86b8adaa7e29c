"""scikit-learn's rules for one network: when training ends by `tol`, and how "adaptive" and "invscaling" change the rate."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from onelaunch.train.history import History
from onelaunch.train.loop import Listener

STEERED = ("adaptive", "invscaling")
RATE_RULES = ("constant", *STEERED)  # scikit-learn's values of `learning_rate`; the steered ones are of "sgd" alone
RATE_DIVISOR = 5.0  # of "adaptive"
MIN_RATE = 1e-6  # "adaptive" ends training instead of dividing a rate that is not above it


@dataclass
class Convergence:
    """The state of these rules between the epochs and calls that train one network."""

    rate_rule: str = "constant"
    first_rate: float = 0.0
    power_t: float = 0.5
    tol: float = 0.0
    patience: float = math.inf  # epochs without an improvement by `tol` that are borne
    ends_training: bool = False
    learning_rate: float = 0.0  # of the next step where the rule steers it, else of the last one
    rows_seen: int = 0
    best: float = math.inf
    epochs_without_improvement: int = 0
    reached: bool = False  # in the last epoch: training ends

    @property
    def steers_rate(self) -> bool:
        return self.rate_rule != "constant"

    def epoch_ended(self, loss: float, rows: int) -> None:
        """Note the loss of an epoch that has trained on so many rows, and apply the rules."""
        self.rows_seen += rows
        improved = loss <= self.best - self.tol
        self.epochs_without_improvement = 0 if improved else self.epochs_without_improvement + 1
        self.best = min(self.best, loss)
        if self.rate_rule == "invscaling":
            self.learning_rate = self.first_rate / (self.rows_seen + 1) ** self.power_t
        self.reached = False
        if self.epochs_without_improvement > self.patience:
            self._out_of_patience()

    def _out_of_patience(self) -> None:
        if self.rate_rule == "adaptive" and self.learning_rate > MIN_RATE:
            self.learning_rate /= RATE_DIVISOR
            self.epochs_without_improvement = 0
        else:
            self.reached = self.ends_training


class EpochRules(Listener):
    """Applies a network's rules after each epoch of `fit`, and prints the lines of scikit-learn's `verbose`."""

    def __init__(self, convergence: Convergence, rows: int, *, verbose: bool) -> None:
        self.convergence, self.rows, self.verbose = convergence, rows, verbose
        self.may_stop = convergence.ends_training

    @property
    def stop(self) -> bool:
        return self.convergence.reached

    def epoch(self, history: History, record: dict[str, Any]) -> None:
        rules, validation = self.convergence, record["validation"]
        if rules.steers_rate:
            record["lr"] = rules.learning_rate
        else:
            rules.learning_rate = record["lr"]
        if self.verbose:
            print(f"Iteration {len(history.epochs)}, loss = {record['loss']:.8f}")
            if validation:
                print(f"Validation score: {validation_score(validation):f}")
        rules.epoch_ended(validation["loss"] if validation else record["loss"], self.rows)
        if rules.reached and self.verbose:
            print(f"The loss did not improve by tol={rules.tol} for {rules.patience} consecutive epochs. Stopping.")


def validation_score(validation: dict[str, Any]) -> float:
    """The score of an epoch's validation: the accuracy, or minus the loss where there is none."""
    score: float = -validation["loss"] if validation["accuracy"] is None else validation["accuracy"]
    return score
