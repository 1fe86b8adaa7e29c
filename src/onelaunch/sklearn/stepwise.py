"""The eager engine with the row order and the learning rate of scikit-learn's rules, which no native engine has."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from onelaunch.engines.contract import Run
from onelaunch.engines.eager.session import EagerSession
from onelaunch.sklearn.convergence import Convergence


class StepwiseEngine:
    """An engine for one network: `shuffle=False` visits rows in their order, and `convergence` may steer the rate."""

    name = "eager"

    def __init__(self, convergence: Convergence, *, shuffle: bool) -> None:
        self.convergence, self.shuffle = convergence, shuffle

    @property
    def reason(self) -> str:
        """Why no other engine trains the network."""
        if not self.shuffle:
            return "shuffle=False visits the rows in their order"
        return f"learning_rate={self.convergence.rate_rule!r} follows the losses"

    def unavailable_reason(self, device: torch.device) -> str:
        return ""

    def unsupported_reason(self, run: Run) -> str:
        return ""

    def start(self, run: Run, state: Mapping[str, torch.Tensor]) -> StepwiseSession:
        return StepwiseSession(run, state, self)


class StepwiseSession(EagerSession):
    def __init__(self, run: Run, state: Mapping[str, torch.Tensor], engine: StepwiseEngine) -> None:
        self.engine = engine
        super().__init__(run, state)

    def _initial_uncaptured_reason(self) -> str:
        return self.engine.reason  # a captured step would read rates that were written before the epoch

    def _order_of(self, epoch: int) -> torch.Tensor:
        if self.engine.shuffle:
            return super()._order_of(epoch)
        return torch.arange(self.spec.rows, device=self.run.device)

    def _set_rate(self, rate: float) -> None:
        rules = self.engine.convergence
        super()._set_rate(rules.learning_rate if rules.steers_rate else rate)
