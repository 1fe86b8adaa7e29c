"""The compiled engine at work: the eager engine's step with its forward, loss and backward compiled."""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

from onelaunch.engines.compiled.channels_last import ChannelsLast
from onelaunch.engines.compiled.dropout import CompiledDropout
from onelaunch.engines.contract import Run
from onelaunch.engines.eager.dropout import RunDropout
from onelaunch.engines.eager.session import EVALUATION_ROWS, EagerSession
from onelaunch.errors import first_line
from onelaunch.fuse.decide import WITH_GRADIENTS, compiled
from onelaunch.step.capturable_optimizer import settings_on_device
from onelaunch.step.optimizer_update import OptimizerUpdate, create_state, optimizer_update

log = logging.getLogger("onelaunch")
Rows = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


class CompiledSession(EagerSession):
    """Full batches and full blocks of validation rows run compiled; an epoch's last, partial batch runs as in eager.

    A model that cannot be compiled trains as in the eager engine, and a log line says so.
    """

    auto_precision = "tf32"

    def __init__(self, run: Run, state: Mapping[str, torch.Tensor]) -> None:
        self._layout = ChannelsLast(run.model)
        try:
            super().__init__(run, state)
        except BaseException:
            self._layout.restore()
            raise
        self._rows = torch.zeros_like(self._batch_index)  # one tensor for all steps, before and in the capture
        train: Any = types.MethodType(EagerSession._loss_and_correct, self)
        evaluate: Any = types.MethodType(EagerSession._evaluate_rows, self)
        self._compiled_train: Rows | None = compiled(train, WITH_GRADIENTS, captured=True)
        self._compiled_evaluate: Rows | None = compiled(evaluate, WITH_GRADIENTS, captured=True)
        self._captured_update: OptimizerUpdate | None = None  # its tables hold the addresses of the captured gradients

    def _make_dropout(self) -> RunDropout:
        run = self.run
        return CompiledDropout(run.model, run.spec.seed, min(run.spec.batch_size, run.spec.rows), run.device)

    def _describe(self) -> str:
        how = "captured as a CUDA graph and replayed" if not self._uncaptured_reason else self._uncaptured_reason
        return f"torch.compile with our kernels: forward, loss and backward are compiled; the step is {how}"

    def _loss_and_correct(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self._compiled_train is None or len(rows) != len(self._rows):
            return super()._loss_and_correct(rows)
        self._rows.copy_(rows)
        try:
            return self._compiled_train(self._rows)
        except Exception as error:
            if self._warm_steps:  # the model itself failed, as it would in eager
                raise
            self._compiled_train = self._compiled_evaluate = None
            log.warning("the model cannot be compiled, and trains as in eager: %s", first_line(error))
            return super()._loss_and_correct(rows)

    def _evaluate_rows(self, x: tuple[torch.Tensor, ...], y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self._compiled_evaluate is None or len(y) != max(EVALUATION_ROWS, self.spec.batch_size):
            return super()._evaluate_rows(x, y)
        return self._compiled_evaluate(x, y)

    def _capture(self, inputs: tuple[Any, ...], target: torch.Tensor) -> None:
        self._captured_update = self._make_update()
        super()._capture(inputs, target)
        if self._captured_update is not None:
            self._captured_update.fill_tables()

    def close(self) -> None:
        super().close()
        self._layout.restore()

    @functools.cached_property
    def _uncaptured_update(self) -> OptimizerUpdate | None:
        """The update of steps that are not replayed, made in the first one: a resumed run has its state by then."""
        create_state(self.optimizer)
        return self._make_update()

    def _make_update(self) -> OptimizerUpdate | None:
        (group,) = self.optimizer.param_groups
        settings = torch.tensor(settings_on_device(self.optimizer, group), dtype=torch.float64, device=self.run.device)
        return optimizer_update(self.optimizer, [self.lr], [settings], self.scaler)

    def _update(self) -> None:
        """With our kernel from the first step on: a resumed run must compute the same bits at other positions."""
        update = self._captured_update if torch.cuda.is_current_stream_capturing() else self._uncaptured_update
        if update is not None:
            update.launch()
        else:
            super()._update()
