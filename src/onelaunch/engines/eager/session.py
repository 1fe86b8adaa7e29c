"""The eager engine: PyTorch autograd, one operation after another, for any nn.Module on any device.

It is the reference for the other engines, so it is written to be read: gather, forward, loss, backward, `torch.optim` step.
On CUDA with memory="plan", the same step is captured once and replayed where the model allows it. Several processes split
every batch between them through DDP.
"""

from __future__ import annotations

import contextlib
import math
import time
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from onelaunch.device import AUTOCAST_DTYPES
from onelaunch.engines.contract import Metrics, Monitor, Run, Segment, State
from onelaunch.engines.eager.captured import CapturedStep
from onelaunch.engines.eager.dropout import RunDropout
from onelaunch.engines.eager.loader import Batch, loader_batches
from onelaunch.engines.eager.process_settings import ProcessSettings
from onelaunch.engines.eager.torch_optimizer import make_optimizer, optimizer_state, restore_optimizer, set_step_counts
from onelaunch.errors import OnelaunchError
from onelaunch.optimizers import OPTIMIZERS
from onelaunch.rng import permutation
from onelaunch.run.distributed import LostRankError, is_lost_rank, lost_rank_error, world
from onelaunch.run.objective import as_features, count_correct, has_accuracy, loss_of, own_features, values_per_row
from onelaunch.run.step_scalars import batch_weights

EVALUATION_ROWS = 256
REPORT_SECONDS = 0.05
AGREE_STEPS = 8  # steps between two checks whether some rank wants to stop
WARM_UP_STEPS = 3  # before a capture: libraries allocate their workspaces, optimizers their state


class EagerSession:
    auto_precision = "fp32"  # what precision="auto" means
    follows_model = True

    def __init__(self, run: Run, state: Mapping[str, torch.Tensor]) -> None:
        self.run, self.spec, self.model = run, run.spec, run.model
        self.precision = self.auto_precision if run.spec.precision == "auto" else run.spec.precision
        self.world = world()
        self._uncaptured_reason = self._initial_uncaptured_reason()
        self.plan = self._describe()
        self.parameters = {name: p for name, p in run.model.named_parameters() if p.requires_grad}
        self.dtype = next(iter(self.parameters.values())).dtype
        self.lr = torch.zeros((), device=run.device)  # on the device, so that a captured step reads it there
        self.optimizer = make_optimizer(run, list(self.parameters.values()), self.lr)
        self.scaler = torch.amp.GradScaler(run.device.type) if self.precision == "fp16" else None
        self._modes = {module: module.training for module in run.model.modules()}
        self._restore(state)
        exact = run.spec.precision == "fp32"
        self.settings = ProcessSettings(run.device, self.precision, run.spec.seed, state, exact=exact)
        self.allocations = self.settings.allocations
        self.forward: torch.nn.Module = run.model
        if self.world.size > 1:
            self.forward = torch.nn.parallel.DistributedDataParallel(run.model)
        self.dropout = self._make_dropout()
        self.order = torch.empty(run.spec.rows, dtype=torch.int64, device=run.device)
        self._next_order: tuple[int, torch.Tensor] | None = None  # (epoch, order), made while the GPU is busy
        self.losses, self.rates = torch.empty(2, run.spec.steps_per_epoch, device=run.device)
        self.correct = torch.zeros((), dtype=torch.int64, device=run.device)
        self._batches: Iterator[Batch] = iter(())
        self._clock = torch.zeros(2, dtype=torch.int64, device=run.device)
        self._captured: CapturedStep | None = None
        if not self._uncaptured_reason:
            contexts = (self._autocast, self.dropout.leaving_out)
            self._captured = CapturedStep(run.model, run.loss_function, self.parameters.values, self._clock, contexts)
        self._batch_index = torch.arange(min(run.spec.batch_size, run.spec.rows), device=run.device)
        self._warm_steps = 0

    def _make_dropout(self) -> RunDropout:
        run = self.run
        functional = run.network.functional_dropouts if run.network else 0
        return RunDropout(run.model, run.spec.seed, min(run.spec.batch_size, run.spec.rows), run.device, functional)

    def _initial_uncaptured_reason(self) -> str:
        if self.run.device.type != "cuda":
            return "this is not a CUDA device"
        if self.world.size > 1:
            return "several processes share the step"
        if self.run.loader is not None:
            return "batches come from a DataLoader"
        if any(part.device != self.run.device for part in (self.run.x, *self.run.more_x)):
            return "rows are in host memory"
        return "" if self.spec.memory == "plan" else f"memory={self.spec.memory!r}"

    def _describe(self) -> str:
        if not self._uncaptured_reason:
            return "PyTorch autograd: the step is captured as a CUDA graph and replayed"
        parts = f", a part of the rows on each of {self.world.size} ranks" if self.world.size > 1 else ""
        reason = f" ({self._uncaptured_reason})" if self.run.device.type == "cuda" else ""
        gathers = f"PyTorch autograd: each step gathers its rows{parts}"
        return f"{gathers}, then runs the model's operations one by one{reason}"

    def segments(self, first_step: int, monitor: Monitor) -> Iterator[Segment]:
        step = first_step
        if OPTIMIZERS[self.spec.optimizer].counts_steps:
            set_step_counts(self.optimizer, first_step, self.run.device)
        while step < self.spec.total_steps:
            with self.settings.run_settings():
                segment = self._segment(step, monitor)
            yield segment
            step += len(segment.losses)

    def _segment(self, first_step: int, monitor: Monitor) -> Segment:
        spec, run = self.spec, self.run
        end, epoch = spec.epoch_end(first_step), spec.epoch_of(first_step)
        epoch_start = epoch * spec.steps_per_epoch
        self._begin_epoch(epoch, first_step - epoch_start)
        counts = has_accuracy(spec)
        self.model.train()
        self._follow_changes()
        self._clock.copy_(torch.tensor([first_step - epoch_start, first_step]))
        reported, step = time.perf_counter(), first_step
        for step in range(first_step, end):
            self._any_step(step)
            now = time.perf_counter()
            if self.world.size > 1:
                if (step + 1 - first_step) % AGREE_STEPS and step + 1 < end:
                    continue
                value = self.losses[step - epoch_start].item()
                monitor.report(step + 1, value * self.world.size, None)
                if self.world.any(monitor.stop or not math.isfinite(value), run.device):
                    break
            elif now - reported > REPORT_SECONDS or monitor.stop:
                # The only synchronisation with a GPU.
                reported, value = now, self.losses[step - epoch_start].item()
                monitor.report(step + 1, value, int(self.correct) if counts else None)
                if monitor.stop or not math.isfinite(value):
                    break
        done = step + 1
        if run.device.type == "cuda" and done == end < spec.total_steps and run.loader is None:
            self._next_order = epoch + 1, permutation(spec.rows, spec.seed, epoch + 1, device="cpu").pin_memory()
        losses = self.world.sum(self.losses[first_step - epoch_start : done - epoch_start]).to("cpu", copy=True)
        correct = int(self.world.sum(self.correct)) if counts else None
        validation = self._evaluate() if done == end else None
        weights = None
        if run.weights is not None:
            sums = batch_weights(spec, run.weights.cpu().numpy(), self.order.cpu().numpy())
            weights = torch.from_numpy(sums[first_step - epoch_start : done - epoch_start])
        return Segment(first_step, losses, correct, validation, weights)

    def _begin_epoch(self, epoch: int, done: int) -> None:
        """Write the epoch's row order and learning rates, always to the same memory, from which a captured step reads.

        `done`: the steps of the epoch that the run has taken already.
        """
        spec = self.spec
        if self.run.loader is not None:
            self._batches = loader_batches(self.run.loader, spec.seed, epoch, done)
            self.losses.fill_(math.nan)
            self.correct.zero_()
            return
        order = self._order_of(epoch)
        self.order.copy_(order if self.run.train_rows is None else self.run.train_rows[order])
        self.losses.fill_(math.nan)
        self.correct.zero_()
        if not self._uncaptured_reason:
            first = epoch * spec.steps_per_epoch
            last = min(first + spec.steps_per_epoch, spec.total_steps)
            self.rates[: last - first].copy_(torch.tensor([spec.lr_at(step) for step in range(first, last)]))

    def _order_of(self, epoch: int) -> torch.Tensor:
        if self._next_order is not None and self._next_order[0] == epoch:
            return self._next_order[1].to(self.run.device, non_blocking=True)
        return permutation(self.spec.rows, self.spec.seed, epoch, device=self.run.device)

    def _any_step(self, step: int) -> None:
        """One step: a replay of the graph if there is one and the batch is full, else operation by operation."""
        captured = self._captured
        if captured is not None and captured.is_ready and self.spec.rows_of(step) == len(self._batch_index):
            captured.replay()
            return
        index = step % self.spec.steps_per_epoch
        self.dropout.begin_step(step)
        self._set_rate(self.spec.lr_at(step))
        rows = self.order[self.spec.batch_slice(step)]
        part = self.world.part(len(rows))
        self.dropout.first_row = part.start
        fraction: float | torch.Tensor = len(rows[part]) / len(rows) if self.world.size > 1 else 1.0
        if self.run.weights is not None and self.world.size > 1:
            weights = self.run.weights[rows]
            fraction = weights[part].sum() / weights.sum().clamp_min(torch.finfo(weights.dtype).tiny)
        try:
            with contextlib.nullcontext() if captured is None else captured.carried():
                self._step(rows[part], fraction, self.losses[index])
        except LostRankError:
            raise
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            if is_lost_rank(error):
                raise lost_rank_error(error) from error
            if isinstance(error, OnelaunchError):
                raise
            culprit, reason = self._failure(error)
            raise OnelaunchError(
                f"{culprit} failed at step {step}, on a batch of {len(rows)} rows: {reason}"
            ) from error
        self._clock.copy_(torch.tensor([index + 1, step + 1]))
        self._warm_steps += 1
        if self._warm_steps >= WARM_UP_STEPS and captured is not None and not captured.is_ready:
            self._try_capture(rows)

    def _failure(self, error: Exception) -> tuple[str, str]:
        """What of the user's failed, the model or the loss, and why."""
        reason = str(error).strip().split("\n")[0]
        if "does not require grad" in reason:
            return (
                "loss",
                "it depends on no parameter that requires gradients: do not detach it, nor freeze the whole model",
            )
        frames = (frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__))
        in_loss = self.run.loss_function is not None and EagerSession._loss.__code__ in frames
        return ("loss" if in_loss else "model"), reason

    def _set_rate(self, rate: float) -> None:
        self.lr.fill_(rate)
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr if self.run.device.type == "cuda" else rate

    def _try_capture(self, rows: torch.Tensor) -> None:
        """Capture the step, so that the next ones are replayed, unless the model does not allow it."""
        assert self._captured is not None
        if self.scaler is not None and not getattr(self.optimizer, "_step_supports_amp_scaling", False):
            self._uncaptured_reason = f"{self.spec.optimizer} checks the loss scale of fp16 on the host"
        else:
            self.optimizer.zero_grad(set_to_none=True)
            inputs, target = self._batch(rows)
            self._capture(inputs, target)
            self._uncaptured_reason = self._captured.reason
            if self._uncaptured_reason and self.scaler is not None:
                # It takes gradients that were recorded for unscaled ones, and would not unscale.
                scaler = torch.amp.GradScaler(self.run.device.type)
                scaler.load_state_dict(self.scaler.state_dict())
                self.scaler = scaler
        if self._uncaptured_reason:
            self._captured = None
        self.plan = self._describe()

    def _capture(self, inputs: tuple[Any, ...], target: torch.Tensor) -> None:
        assert self._captured is not None
        self._captured.capture(self._captured_step, inputs, target)

    def _follow_changes(self) -> None:
        """Before an epoch: a callback may have changed what the captured step depends on."""
        if self._captured is not None and self._captured.follow_changes():
            self._warm_steps = 0
            self._uncaptured_reason = self._captured.reason
            if self._uncaptured_reason:
                self._captured = None
                self.plan = self._describe()

    def _captured_step(self, clock: torch.Tensor) -> None:
        index = clock[:1]
        self.dropout.begin_step(clock[1])
        self.dropout.first_row = 0
        self.lr.copy_(self.rates.index_select(0, index)[0])
        rows = self.order.index_select(0, index * len(self._batch_index) + self._batch_index)
        loss = torch.empty((), device=self.run.device)
        self._step(rows, 1.0, loss)
        self.losses.index_copy_(0, index, loss.view(1))

    def _step(self, rows: torch.Tensor, fraction: float | torch.Tensor, loss_out: torch.Tensor) -> None:
        """Train on `rows`, this process's part of a batch, and write its part of the mean loss.

        `fraction`: the rows' part of the batch's rows, or of its weight.
        """
        self.optimizer.zero_grad(set_to_none=True)
        loss, correct = self._loss_and_correct(rows)
        # DDP averages over ranks, whose parts may differ in size; a part may even be empty.
        scaled = loss if self.world.size == 1 else loss * (fraction * self.world.size)
        if self.scaler is None:
            scaled.backward()
            self._clip()
            self._update()
        else:
            self.scaler.scale(scaled).backward()
            if self.spec.clip_norm is not None:
                self.scaler.unscale_(self.optimizer)
            self._clip()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        loss_out.copy_(loss.detach() * fraction)
        if correct is not None:
            self.correct += correct

    def _loss_and_correct(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The mean loss of these training rows, and the number of correct predictions if they are counted."""
        x, y = self._batch(rows)
        with self._autocast(), self.dropout.functions():
            output = self.forward(*x)
        if isinstance(output, torch.Tensor):
            output = output.to(self.dtype)
        weights = None if self.run.weights is None else self.run.weights[rows].to(self.dtype)
        loss = self._loss(output, y, weights) if len(y) else output.sum() * 0
        return loss, count_correct(self.spec, output.detach(), y) if has_accuracy(self.spec) else None

    def _update(self) -> None:
        self.optimizer.step()

    def _batch(self, rows: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """The model's inputs and the targets: of these rows, or the next batch of the DataLoader."""
        run = self.run
        if run.loader is None:
            parts = [part[rows.to(part.device)].to(run.device) for part in (run.x, *run.more_x)]
            return tuple(as_features(part, self.dtype) for part in parts), run.y[rows]
        inputs, y = next(self._batches)
        y = y.to(run.device, run.y.dtype).reshape(len(y), *run.y.shape[1:])
        return tuple(as_features(part.to(run.device), self.dtype) for part in inputs), y

    def _loss(self, output: Any, y: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
        if self.run.loss_function is None:
            return loss_of(self.spec, output, y, weights)
        value = self.run.loss_function(output, y)
        if not isinstance(value, torch.Tensor) or value.ndim:
            what = f"shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
            raise OnelaunchError(f"loss must return a tensor with one number, the mean over the batch, not {what}")
        return value

    def _clip(self) -> None:
        if self.spec.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.spec.clip_norm)

    def _evaluate(self) -> Metrics | None:
        if self.run.validation is None:
            return None
        all_rows = len(self.run.validation[0])
        part = self.world.part(all_rows)
        x, y = (tensor[part] for tensor in self.run.validation)
        more = [tensor[part] for tensor in self.run.more_validation_x]
        rows = max(EVALUATION_ROWS, self.spec.batch_size)
        total = torch.zeros((), dtype=torch.float64, device=x.device)
        correct = torch.zeros((), dtype=torch.int64, device=x.device)
        self.model.eval()
        with torch.no_grad():
            for first in range(0, len(x), rows):
                part = slice(first, first + rows)
                loss, batch_correct = self._evaluate_rows(tuple(one[part] for one in (x, *more)), y[part])
                total += loss * len(y[part])
                if batch_correct is not None:
                    correct += batch_correct
        loss_sum = self.world.sum(total).item() * values_per_row(self.spec, self.run.outputs)
        return Metrics.of(self.spec, loss_sum, int(self.world.sum(correct)), all_rows, self.run.outputs)

    def _evaluate_rows(self, x: tuple[torch.Tensor, ...], y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The mean loss of these validation rows, and the number of correct predictions if they are counted."""
        with self._autocast():
            output = self.model(*(own_features(one, self.dtype) for one in x))
        if isinstance(output, torch.Tensor):
            output = output.to(self.dtype)
        return self._loss(output, y), count_correct(self.spec, output, y) if has_accuracy(self.spec) else None

    def snapshot(self) -> State:
        state = optimizer_state(self.optimizer, self.parameters)
        state |= self.settings.snapshot()
        if self.scaler is not None:
            scaler = self.scaler.state_dict()
            state["engine.scaler"] = torch.tensor([scaler["scale"], scaler["_growth_tracker"]], dtype=torch.float64)
        return state

    def _restore(self, state: Mapping[str, torch.Tensor]) -> None:
        restore_optimizer(self.optimizer, self.parameters, state, self.run.device)
        if self.scaler is not None and "engine.scaler" in state:
            scale, growth = state["engine.scaler"].tolist()
            self.scaler.load_state_dict({**self.scaler.state_dict(), "scale": scale, "_growth_tracker": int(growth)})

    def _autocast(self) -> contextlib.AbstractContextManager[None]:
        dtype = AUTOCAST_DTYPES.get(self.precision)
        # No cache of cast weights: it lives as long as the outermost autocast, that of a segment; a step changes the weights.
        return torch.autocast(self.run.device.type, dtype=dtype, enabled=dtype is not None, cache_enabled=False)

    def close(self) -> None:
        if self._captured is not None:
            self._captured.release()
        self.forward = self.model
        self.dropout.release()
        self.optimizer.zero_grad(set_to_none=True)
        for module, mode in self._modes.items():
            module.training = mode
