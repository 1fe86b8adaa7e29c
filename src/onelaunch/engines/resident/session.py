"""A run on the resident engine: weights and data move to the device, one kernel trains, and the host watches.

Without a checkpoint the whole run is one launch. With checkpoints it is one launch per epoch, so that the weights can be read
in between. The kernel writes losses, progress and the metrics of each epoch into host memory, which the host polls a few
hundred times per second.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

from onelaunch.device import Chip, chip_of
from onelaunch.engines.contract import Metrics, Monitor, Run, Segment, State
from onelaunch.engines.resident.batch_weights import BatchWeights
from onelaunch.engines.resident.buffers import Buffers
from onelaunch.engines.resident.plan.placement import choose_plan
from onelaunch.engines.resident.plan.plan import Plan
from onelaunch.engines.resident.plan.settings import MAX_DROPOUTS, MIN_EPS, Settings
from onelaunch.engines.resident.plan.stages import stages_of
from onelaunch.engines.resident.source.source_common import HEADERS
from onelaunch.engines.resident.uint8_rows import with_uint8_rows
from onelaunch.engines.stages import UnsupportedNetworkError
from onelaunch.errors import OnelaunchError, UnsupportedError
from onelaunch.nvrtc.compile import Cubin, compile_cubin
from onelaunch.optimizers import constants
from onelaunch.run.objective import has_accuracy

if TYPE_CHECKING:
    from onelaunch.nvrtc.launch import LoadedKernel

FIRST_POLL_SECONDS, POLL_SECONDS = 0.00005, 0.002
LARGEST_CLUSTERS = (16, 8, 1)  # sizes to try, largest first: a driver may not offer 16
REGISTER_RESERVES = (112, 136, 160, 184)  # registers that weights leave free, tried in turn until nothing spills
PATIENCE_SECONDS = 10.0
CLOCK_HZ = 2e9  # roughly, of a multiprocessor
MAX_LOSSES = 2**22  # per launch: 16 MB of host memory
CONTROL = np.dtype(
    [("stop", "<u4"), ("done", "<u4"), ("epochs", "<u4"), ("fault", "<u4"), ("fault_block", "<u4"), ("fault_step", "<u4"),
     ("loss", "<f4"), ("correct", "<u4"), ("finished", "<u4")]
)  # fmt: skip
RECORD = np.dtype([("validation_loss", "<f8"), ("validation_correct", "<u8"), ("correct", "<u8")])
POINTERS = (
    "x", "validation_x", "y", "validation_y", "weights", "state0", "state1", "exchange", "flags", "control", "losses",
    "records", "stamps",
)  # fmt: skip
COUNTS = (
    "rows", "validation_rows", "seed", "first_step", "last_step", "steps_per_epoch", "total_steps", "patience", "fault_step",
    "fault_block", "all_rows",
)  # fmt: skip
NUMBERS = (
    "lr", "momentum", "weight_decay", "log_beta1", "log_beta2", "new_mean", "new_square", "beta2", "eps", "label_smoothing"
)  # fmt: skip
OF_MEMBERS = [("row_numbers", "<u8"), ("permutation_bits", "<u8"), ("keep", "<u4", (2 * MAX_DROPOUTS,))]
PARAMS = np.dtype(
    [(name, "<u8") for name in POINTERS + COUNTS] + [(name, "<f8") for name in NUMBERS] + OF_MEMBERS
    + [("batch_weights", "<u8")]
)  # fmt: skip


def settings_for(run: Run, precision: str) -> Settings:
    assert run.network is not None
    spec = run.spec
    return Settings(
        stages=stages_of(run.network), batch=min(spec.batch_size, spec.rows), rows=spec.rows, precision=precision,
        optimizer=spec.optimizer, momentum=spec.momentum > 0, nesterov=spec.nesterov, weight_decay=spec.weight_decay > 0,
        schedule=spec.schedule, loss=spec.loss, label_smoothing=spec.label_smoothing > 0,
        uint8_rows=run.x.dtype == torch.uint8, validates=run.validation is not None,
        weighted=run.weights is not None, tiny_eps=spec.eps < MIN_EPS,
    )  # fmt: skip


def run_values(run: Run) -> dict[str, int | float]:
    """The parameters that follow from the run itself: counts, seed, rates."""
    spec = run.spec
    logs = {
        name: math.log(beta) if beta else -1e300
        for name, beta in zip(("log_beta1", "log_beta2"), spec.betas, strict=True)
    }
    return {
        "rows": spec.rows, "all_rows": len(run.x), "seed": spec.seed,
        "validation_rows": len(run.validation[0]) if run.validation else 0,
        "steps_per_epoch": spec.steps_per_epoch, "total_steps": spec.total_steps,
        "lr": spec.lr, "label_smoothing": spec.label_smoothing, **constants(spec), **logs,
    }  # fmt: skip


def architecture(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}" + ("a" if major >= 9 else "")


@functools.lru_cache(maxsize=16)
def plan_for(settings: Settings, chip: Chip, reserved_registers: int) -> Plan:
    """The plan of a run. It is needed when the engine is chosen, and again when the run starts."""
    return choose_plan(settings, chip, reserved_registers=reserved_registers)


def spilled_bytes(cubin: Cubin) -> int:
    found = re.findall(r"(\d+) bytes spill stores", cubin.log)
    return sum(map(int, found))


class ResidentSession:
    follows_model = False

    def __init__(
        self, run: Run, state: Mapping[str, torch.Tensor], *, plan: Plan | None = None, fault: tuple[int, int] | None = None,
        patience: float = PATIENCE_SECONDS, stamps: bool = False,
    ) -> None:  # fmt: skip
        """The keyword arguments are for tests and measurements: another plan; the (step, block) of an injected fault."""
        from onelaunch.engines.resident.pinned import MappedArray

        run = with_uint8_rows(run)
        self.run, self.spec, self.device = run, run.spec, run.device
        self.precision = run.spec.compiled_precision
        self.layout, self.cubin, self.kernel = self._prepare(plan, fault is not None, stamps)
        registers = f"{self.kernel.registers} registers per thread, {self.kernel.local_bytes} bytes of stack"
        self.plan = f"{self.layout.describe()}\n{registers}"
        self.allocations = {"launches": 0}
        self.stream = torch.cuda.Stream(run.device)
        self._control = MappedArray(1, CONTROL, run.device)
        self._max_steps = min(max(MAX_LOSSES, run.spec.steps_per_epoch), run.spec.total_steps)
        self._losses = MappedArray(self._max_steps, np.float32, run.device)
        self._records = MappedArray(self._max_steps // run.spec.steps_per_epoch + 2, RECORD, run.device)
        self._buffers = Buffers(run, self.layout, self.precision, state)
        summing = self.layout.settings.weighted
        self._batch_weights = BatchWeights(self._max_steps, self._load("sum_weights")) if summing else None
        self._params = self._parameters(fault, patience)
        self._running = False

    def _prepare(self, plan: Plan | None, faults: bool, stamps: bool) -> tuple[Plan, Cubin, LoadedKernel]:
        """A plan whose blocks the device holds at once. The largest cluster may not fit, for example into a MIG slice."""
        from onelaunch.nvrtc.launch import load

        chip = chip_of(self.device)
        for largest in LARGEST_CLUSTERS if chip.clusters else (1,):
            possible = dataclasses.replace(chip, clusters=chip.clusters and largest > 1, largest_cluster=largest)
            try:
                layout, cubin = self._compile(plan, possible, faults, stamps)
            except UnsupportedNetworkError as reason:  # `unsupported_reason` assumed the largest cluster
                raise UnsupportedError(
                    f"with clusters of {largest} blocks, which fit into {self.device}, {reason}"
                ) from None
            kernel = load(cubin, "train", self.device)
            at_once = kernel.max_active_clusters(
                block=layout.threads, cluster=layout.blocks if layout.cluster else 1, shared_bytes=layout.shared.size
            )
            if at_once >= (1 if layout.cluster else layout.blocks):
                return layout, cubin, kernel
        raise UnsupportedError(
            f"engine='resident' needs {layout.blocks} blocks at once, {self.device} holds fewer: pass engine='auto'"
        )

    def _load(self, name: str) -> LoadedKernel:
        from onelaunch.nvrtc.launch import load

        return load(self.cubin, name, self.device)

    def _compile(self, plan: Plan | None, chip: Chip, faults: bool, stamps: bool) -> tuple[Plan, Cubin]:
        """The chosen plan, compiled. Where the compiler spills registers, more weights move to shared memory."""
        settings = settings_for(self.run, self.precision)
        tried: list[tuple[int, Plan, Cubin]] = []
        for reserved in REGISTER_RESERVES:
            try:
                layout = plan or plan_for(settings, chip, reserved)
            except UnsupportedNetworkError:
                if not tried:
                    raise
                break
            if tried and layout.rows < tried[0][1].rows:  # a few spilled bytes cost less than another pass
                break
            source = layout.source(faults=faults, stamps=stamps)
            cubin = compile_cubin(source, architecture(self.device), headers=HEADERS)
            tried.append((spilled_bytes(cubin), layout, cubin))
            if plan or not tried[-1][0]:
                break
        return min(tried, key=lambda entry: entry[0])[1:]

    # Parameters of the kernel.

    def _parameters(self, fault: tuple[int, int] | None, patience: float) -> np.ndarray:
        run = self.run
        params = np.zeros(1, PARAMS)
        for name, tensor in self._buffers.by_name.items():
            params[name] = tensor.data_ptr()
        params["control"], params["records"] = self._control.address, self._records.address
        if self._batch_weights:
            params["batch_weights"] = self._batch_weights.sums.data_ptr()
        for name, value in run_values(run).items():
            params[name] = value
        params["patience"] = int(patience * CLOCK_HZ)
        params["fault_step"], params["fault_block"] = fault if fault else (2**63, 0)
        return params

    # Training.

    def segments(self, first_step: int, monitor: Monitor) -> Iterator[Segment]:
        spec, step = self.spec, first_step
        while step < spec.total_steps:
            end = self._launch_end(step)
            self._launch(step, end)
            for segment in self._watch(step, end, monitor):
                step = segment.first_step + len(segment.losses)
                yield segment

    def _launch_end(self, step: int) -> int:
        """The end of the run; or of an epoch, where its weights are needed or the losses would exceed MAX_LOSSES."""
        spec = self.spec
        end = spec.epoch_end(step)
        while not self.run.checkpoints and end < spec.total_steps and spec.epoch_end(end) - step <= self._max_steps:
            end = spec.epoch_end(end)
        return end

    def _launch(self, first: int, end: int) -> None:
        control = self._control.array
        control[:] = 0
        control["done"] = first
        params = self._params
        params["first_step"], params["last_step"] = first, end
        params["losses"] = self._losses.address
        self._first = first
        self._buffers.by_name["flags"].zero_()
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        layout = self.layout
        if self._batch_weights:
            self._batch_weights.launch(self.stream, end - first, params.tobytes())
        self.kernel.launch(
            self.stream, grid=layout.blocks, block=layout.threads, cluster=layout.blocks if layout.cluster else 1,
            shared_bytes=layout.shared.size, cooperative=not layout.cluster and layout.blocks > 1,
            args=[params.tobytes()],
        )  # fmt: skip
        self.allocations["launches"] += 1
        self._running = True

    def _watch(self, first: int, end: int, monitor: Monitor) -> Iterator[Segment]:
        """Yield a segment per epoch that the kernel finishes, until the launch has ended."""
        spec, control = self.spec, self._control.array[0]
        step, epochs, reported = first, 0, 0.0
        begin = time.perf_counter()
        finished = torch.cuda.Event()
        finished.record(self.stream)
        while True:
            over = finished.query()
            while int(control["epochs"]) > epochs:
                until = min(spec.epoch_end(step), end)
                yield self._segment(step, until, self._records.array[epochs])
                step, epochs = until, epochs + 1
            if over:
                break
            now = time.perf_counter()
            if now - reported > 0.03:
                reported = now
                counts = has_accuracy(spec)
                monitor.report(
                    int(control["done"]), float(control["loss"]), int(control["correct"]) if counts else None
                )
            if monitor.stop:
                control["stop"] = 1
            # Short waits first: they add little to a short run.
            time.sleep(min(POLL_SECONDS, FIRST_POLL_SECONDS + (now - begin) / 500))
        finished.synchronize()
        self._running = False
        self._raise_on_fault()
        done = int(control["done"])
        if done > step:  # stopped within an epoch
            yield self._segment(step, done, None)

    def _segment(self, first: int, until: int, record: np.void | None) -> Segment:
        spec = self.spec
        losses = torch.from_numpy(self._losses.array[first - self._first : until - self._first].copy())
        correct = int(self._control.array[0]["correct"] if record is None else record["correct"])
        validation = None
        if record is not None and self.run.validation is not None:
            rows = len(self.run.validation[0])
            loss_sum, hits = float(record["validation_loss"]), int(record["validation_correct"])
            validation = Metrics.of(spec, loss_sum, hits, rows, self.run.outputs)
        weights = None
        if self._batch_weights:  # they were there before the first step
            weights = self._batch_weights.sums[first - self._first : until - self._first].to("cpu", copy=True)
        return Segment(first, losses, correct if has_accuracy(spec) else None, validation, weights)

    def _raise_on_fault(self) -> None:
        control = self._control.array[0]
        if control["fault"]:
            what = self.layout.exchange_names().get(int(control["fault"]) - 1, "its rows")
            raise OnelaunchError(
                f"engine='resident' stopped: block {control['fault_block']} timed out waiting for {what} at step "
                f"{control['fault_step']}; another program may hold the GPU: try again, or pass engine='eager'"
            )

    # Results.

    def snapshot(self) -> State:
        torch.cuda.current_stream(self.device).wait_stream(self.stream)
        self._buffers.write_back()
        return self._buffers.state()

    @property
    def stamps(self) -> torch.Tensor:
        """Clocks spent in each phase, of a session with `stamps=True`."""
        return self._buffers.by_name["stamps"]

    def close(self) -> None:
        if self._running:
            self._control.array["stop"] = 1
            self.stream.synchronize()
            self._running = False
        self._buffers.write_back()
