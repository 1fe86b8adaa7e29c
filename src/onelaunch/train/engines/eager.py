"""The eager engine: PyTorch autograd, one operation after another, for any nn.Module on any device.

It is the oracle the other engines are held against, so it is written to be read: gather, forward, loss, backward,
`torch.optim` step.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator, Mapping

import torch

from onelaunch.device import cuda_capability
from onelaunch.errors import OnelaunchError
from onelaunch.rng import permutation
from onelaunch.train.engines.contract import Metrics, Monitor, Run, Segment, State
from onelaunch.train.engines.dropout import RunDropout
from onelaunch.train.objective import as_features, count_correct, loss_of, predictions_per_row

EVALUATION_ROWS = 256
REPORT_SECONDS = 0.05
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
STATE_NAMES = {"momentum": "momentum_buffer", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}  # ours: torch.optim's


class EagerEngine:
    name = "eager"

    def here(self, device: torch.device) -> str:
        return ""

    def refuses(self, run: Run) -> str:
        spec, cuda = run.spec, run.device.type == "cuda"
        if spec.precision in ("tf32", "fp16") and not cuda:
            return f"precision={spec.precision!r} needs a CUDA device; on this one pass 'fp32' or 'bf16'"
        if spec.precision in ("tf32", "bf16") and cuda and cuda_capability(run.device) < (8, 0):
            return f"precision={spec.precision!r} needs a GPU of compute capability 8.0 or more; pass 'fp32' or 'fp16'"
        if spec.memory == "stream":
            return "memory='stream' is not in this version; pass 'plan' or 'caching'"
        return ""

    def start(self, run: Run, state: Mapping[str, torch.Tensor]) -> EagerSession:
        return EagerSession(run, state)


class EagerSession:
    def __init__(self, run: Run, state: Mapping[str, torch.Tensor]) -> None:
        self.run, self.spec, self.model = run, run.spec, run.model
        self.precision = "fp32" if run.spec.precision == "auto" else run.spec.precision
        self.plan = "PyTorch autograd: each step gathers its rows, then runs the model's operations one by one"
        self.allocations: dict[str, int] = {}
        self.parameters = {name: p for name, p in run.model.named_parameters() if p.requires_grad}
        self.dtype = next(iter(self.parameters.values())).dtype
        self.optimizer = _optimizer(run, list(self.parameters.values()))
        self.scaler = torch.amp.GradScaler(run.device.type) if self.precision == "fp16" else None
        self._modes = {module: module.training for module in run.model.modules()}
        self._restore(state)
        self.dropout = RunDropout(run.model, run.spec.seed, run.spec.batch_size, run.device)

    def segments(self, first_step: int, monitor: Monitor) -> Iterator[Segment]:
        step = first_step
        for parameter_state in self.optimizer.state.values():
            if "exp_avg" in parameter_state:  # a checkpoint of another engine has no step of its own
                parameter_state.setdefault("step", torch.tensor(float(first_step)))
        while step < self.spec.total_steps:
            with self._own_settings():
                segment = self._segment(step, monitor)
            yield segment
            step += len(segment.losses)

    def _segment(self, first_step: int, monitor: Monitor) -> Segment:
        spec, run = self.spec, self.run
        end = spec.epoch_end(first_step)
        order = permutation(spec.rows, spec.seed, spec.epoch_of(first_step), device=run.device)
        losses = torch.full((end - first_step,), math.nan, device=run.device)
        correct = torch.zeros((), dtype=torch.int64, device=run.device)
        counts = spec.loss != "mse"
        self.model.train()
        reported, step = time.perf_counter(), first_step
        for step in range(first_step, end):
            rows = order[spec.batch_slice(step)]
            x, y = as_features(run.x[rows], self.dtype), run.y[rows]
            try:
                loss, right = self._step(step, x, y)
            except (RuntimeError, ValueError, TypeError, IndexError) as error:
                reason = str(error).strip().split("\n")[0]
                raise OnelaunchError(f"model failed at step {step}, on a batch of {len(x)} rows: {reason}") from error
            losses[step - first_step] = loss
            if right is not None:
                correct += right
            now = time.perf_counter()
            if now - reported > REPORT_SECONDS or monitor.stop:
                reported, value = now, loss.item()  # the one synchronisation with a GPU
                monitor.report(step + 1, value, int(correct) if counts else None)
                if monitor.stop or not math.isfinite(value):
                    break
        done = step + 1
        validation = self._evaluate() if done == end else None
        return Segment(first_step, losses[: done - first_step].cpu(), int(correct) if counts else None, validation)

    def _step(self, step: int, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        self.dropout.begin_step(step)
        for group in self.optimizer.param_groups:
            group["lr"] = self.spec.lr_at(step)
        self.optimizer.zero_grad(set_to_none=True)
        with self._autocast():
            output = self.model(x)
        output = output.to(self.dtype)
        loss = loss_of(self.spec, output, y)
        if self.scaler is None:
            loss.backward()
            self.optimizer.step()
        else:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return loss.detach(), count_correct(self.spec, output.detach(), y)

    def _evaluate(self) -> Metrics | None:
        if self.run.validation is None:
            return None
        x, y = self.run.validation
        rows = max(EVALUATION_ROWS, self.spec.batch_size)
        total = torch.zeros((), dtype=torch.float64, device=x.device)
        correct = torch.zeros((), dtype=torch.int64, device=x.device)
        self.model.eval()
        with torch.no_grad():
            for first in range(0, len(x), rows):
                part = slice(first, first + rows)
                with self._autocast():
                    output = self.model(as_features(x[part], self.dtype))
                output = output.to(self.dtype)
                total += loss_of(self.spec, output, y[part]) * len(output)
                right = count_correct(self.spec, output, y[part])
                if right is not None:
                    correct += right
        predictions = len(x) * predictions_per_row(self.spec, self.run.outputs)
        return Metrics(total.item() / len(x), None if self.spec.loss == "mse" else int(correct) / predictions)

    def snapshot(self) -> State:
        state: State = {}
        for name, parameter in self.parameters.items():
            for ours, theirs in STATE_NAMES.items():
                tensor = self.optimizer.state.get(parameter, {}).get(theirs)
                if tensor is not None:
                    state[f"{ours}.{name}"] = tensor
            if "step" in self.optimizer.state.get(parameter, {}):
                state[f"engine.step.{name}"] = self.optimizer.state[parameter]["step"]
        for name, tensor in zip(("rng_cpu", "rng_cuda"), self._rng, strict=False):
            state[f"engine.{name}"] = tensor
        if self.scaler is not None:
            scaler = self.scaler.state_dict()
            state["engine.scaler"] = torch.tensor([scaler["scale"], scaler["_growth_tracker"]], dtype=torch.float64)
        return state

    def _restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over a snapshot, or begin with a generator that follows the run's seed alone."""
        for name, parameter in self.parameters.items():
            found = {
                theirs: state[f"{ours}.{name}"] for ours, theirs in STATE_NAMES.items() if f"{ours}.{name}" in state
            }
            if found:
                copies = {theirs: tensor.to(parameter).clone() for theirs, tensor in found.items()}
                if f"engine.step.{name}" in state:
                    copies["step"] = state[f"engine.step.{name}"].cpu().clone()
                self.optimizer.state[parameter].update(copies)
        if self.scaler is not None and "engine.scaler" in state:
            scale, growth = state["engine.scaler"].tolist()
            self.scaler.load_state_dict({**self.scaler.state_dict(), "scale": scale, "_growth_tracker": int(growth)})
        with torch.random.fork_rng(self._cuda_devices):
            torch.manual_seed(self.spec.seed)
            self._rng = self._generators()
        if "engine.rng_cpu" in state:
            self._rng[0] = state["engine.rng_cpu"].cpu()
        if "engine.rng_cuda" in state and self._cuda_devices:
            self._rng[1] = state["engine.rng_cuda"].cpu()

    @property
    def _cuda_devices(self) -> list[torch.device]:
        return [self.run.device] if self.run.device.type == "cuda" else []

    def _generators(self) -> list[torch.Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in self._cuda_devices)]

    def _autocast(self) -> contextlib.AbstractContextManager[None]:
        dtype = AUTOCAST.get(self.precision)
        # No cache of cast weights: it is cleared only when the outermost autocast ends, and a step changes the weights.
        return torch.autocast(self.run.device.type, dtype=dtype, enabled=dtype is not None, cache_enabled=False)

    @contextlib.contextmanager
    def _own_settings(self) -> Iterator[None]:
        """The run's generator and matmul precision inside, the user's again outside; allocator calls counted."""
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if self.precision == "tf32" else "highest")
        calls = self._allocator_calls()
        try:
            autocast = torch.autocast(self.run.device.type, enabled=False)  # whatever surrounds the call of fit
            with torch.random.fork_rng(self._cuda_devices), torch.enable_grad(), autocast:
                torch.set_rng_state(self._rng[0])
                for device in self._cuda_devices:
                    torch.cuda.set_rng_state(self._rng[1], device)
                yield
                self._rng = self._generators()
        finally:
            torch.set_float32_matmul_precision(before)
            for name, count in self._allocator_calls().items():
                self.allocations[name] = self.allocations.get(name, 0) + count - calls[name]

    def _allocator_calls(self) -> dict[str, int]:
        if self.run.device.type != "cuda":
            return {}
        stats = torch.cuda.memory_stats(self.run.device)
        return {"cudaMalloc": stats["num_device_alloc"], "pool": stats["allocation.all.allocated"]}

    def close(self) -> None:
        self.dropout.release()
        self.optimizer.zero_grad(set_to_none=True)
        for module, mode in self._modes.items():
            module.training = mode


def _optimizer(run: Run, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    spec = run.spec
    if spec.optimizer == "sgd":
        return torch.optim.SGD(
            parameters, lr=spec.lr, momentum=spec.momentum, nesterov=spec.nesterov, weight_decay=spec.weight_decay
        )
    kind = torch.optim.Adam if spec.optimizer == "adam" else torch.optim.AdamW
    return kind(parameters, lr=spec.lr, betas=spec.betas, eps=spec.eps, weight_decay=spec.weight_decay)


ENGINE = EagerEngine()
