"""Training many members: launches whose blocks take members from a queue, and a host that watches and reads the results."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np
import torch

from onelaunch.device import Chip, chip_of
from onelaunch.engines.contract import Metrics, Run, Segment, State
from onelaunch.engines.members import MemberResult, MembersMonitor, MemberTask
from onelaunch.engines.resident.members.group import members_settings
from onelaunch.engines.resident.members.memory import MembersMemory, SharedRows, all_uint8
from onelaunch.engines.resident.members.placement import FREE, Forced, MembersPlan, choose_members_plan
from onelaunch.engines.resident.members.slices import launches_of, shared_epochs
from onelaunch.engines.resident.plan.settings import Settings
from onelaunch.engines.resident.session import (
    CONTROL,
    PARAMS,
    POLL_SECONDS,
    REGISTER_RESERVES,
    architecture,
    spilled_bytes,
)
from onelaunch.engines.resident.source.source_common import HEADERS
from onelaunch.engines.stages import UnsupportedNetworkError
from onelaunch.errors import OnelaunchError, UnsupportedError
from onelaunch.nvrtc.compile import Cubin, compile_cubin
from onelaunch.nvrtc.launch import LoadedKernel, load
from onelaunch.optimizers import OPTIMIZERS
from onelaunch.run.objective import has_accuracy

MAX_SPILLED_BYTES = 400  # per thread: the few that remain are in rare code
LAUNCH_BYTES = 2**28  # of weights, state and losses
LAUNCH_SECONDS = 5.0  # predicted: results come after each launch
LARGEST_CLUSTERS = (16, 8, 4, 2, 1)
QUEUE = np.dtype([("members", "<u8"), ("next", "<u8"), ("scratch", "<u8"), ("count", "<u8")])


def settings_of(runs: Sequence[Run]) -> Settings:
    return members_settings(runs, uint8_rows=all_uint8(runs))


def members_unsupported_reason(runs: Sequence[Run]) -> str:
    """Why the engine cannot train these runs together, though it may train each alone; empty when it can."""
    try:
        _plan_of(runs)
    except UnsupportedNetworkError as reason:
        return str(reason)
    return ""


def members_plan(runs: Sequence[Run]) -> str:
    """For people: how many members run at once, where each is placed, and the predicted steps per second of all."""
    try:
        found, epochs = _plan_of(runs)
    except UnsupportedNetworkError as reason:
        raise UnsupportedError(f"engine='resident' cannot train these members together: {reason}") from None
    return found.describe(len(runs), epochs)


def _plan_of(runs: Sequence[Run]) -> tuple[MembersPlan, int]:
    """The plan of whole runs, and the epochs in which they can take turns."""
    tasks = [MemberTask(number, run, 0, run.spec.total_steps) for number, run in enumerate(runs)]
    settings = settings_of(runs)
    epochs = 1 if settings.weighted else shared_epochs(tasks)
    return choose_members_plan(settings, chip_of(runs[0].device), len(runs), epochs), epochs


def prepare(
    settings: Settings, device: torch.device, members: int, forced: Forced = FREE, *, epochs: int = 1
) -> tuple[MembersPlan, LoadedKernel, LoadedKernel | None]:
    """The plan with the number of places that the device really has, its kernel, and `sum_weights` if rows have weights."""
    chip = chip_of(device)
    for largest in LARGEST_CLUSTERS if chip.clusters else (1,):
        possible = dataclasses.replace(chip, clusters=chip.clusters and largest > 1, largest_cluster=largest)
        try:
            found, cubin = _compile(settings, possible, device, members, epochs, forced)
        except UnsupportedNetworkError as reason:
            raise UnsupportedError(f"engine='resident' cannot train these members together: {reason}") from None
        kernel, plan = load(cubin, "train", device), found.plan
        places = kernel.max_active_clusters(block=plan.threads, cluster=plan.blocks, shared_bytes=plan.shared.size)
        if places:
            summing = load(cubin, "sum_weights", device) if settings.weighted else None
            return dataclasses.replace(found, places=places), kernel, summing
    raise UnsupportedError(f"{device} has no room for a block of this plan: pass engine='auto'")


def _compile(
    settings: Settings, chip: Chip, device: torch.device, members: int, epochs: int, forced: Forced
) -> tuple[MembersPlan, Cubin]:
    """The chosen plan, compiled. Where the compiler spills registers, more weights move to shared memory."""
    tried: list[tuple[int, MembersPlan, Cubin]] = []
    for reserved in REGISTER_RESERVES:
        try:
            found = choose_members_plan(settings, chip, members, epochs, reserved_registers=reserved, forced=forced)
        except UnsupportedNetworkError:
            if not tried:
                raise
            break
        cubin = compile_cubin(found.plan.source(), architecture(device), headers=HEADERS)
        tried.append((spilled_bytes(cubin), found, cubin))
        if tried[-1][0] <= MAX_SPILLED_BYTES:
            break
    return min(tried, key=lambda entry: entry[0])[1:]


def train_members(
    tasks: Sequence[MemberTask], monitor: MembersMonitor, forced: Forced = FREE
) -> Iterator[MemberResult]:
    """Train every task, and yield the results of a launch when it ends. `forced`: a placement, for tests."""
    for task in tasks:
        if task.last_step <= task.first_step:
            yield MemberResult(task.index, (), dict(cast(State, task.state)))
    tasks = [task for task in tasks if task.last_step > task.first_step]
    if not tasks:
        return
    runs = [task.run for task in tasks]
    settings = settings_of(runs)
    epochs = 1 if settings.weighted else shared_epochs(tasks)
    found, kernel, summing = prepare(settings, runs[0].device, len(tasks), forced, epochs=epochs)
    rows, done, running = SharedRows(found.plan), 0, deque[Launch]()
    try:
        for part in _launches(tasks, found):
            running.append(Launch(part, found, kernel, rows, summing))
            running[-1].start()
            if len(running) > 1:  # the results of a launch are read while the next one runs
                yield from running[0].finish(monitor, done)
                done += running.popleft().steps
            if monitor.stop:
                break
        while running:
            yield from running[0].finish(monitor, done)
            done += running.popleft().steps
    finally:
        for launch in running:
            launch.abandon()


def _launches(tasks: Sequence[MemberTask], found: MembersPlan) -> Iterator[Sequence[MemberTask]]:
    """The tasks in parts whose memory and predicted time are bounded: whole rounds of the places."""
    first, settings = 0, found.plan.settings
    parameters = sum(stage.linear.outputs * (stage.linear.inputs + 1) for stage in settings.stages)
    states = len(OPTIMIZERS[settings.optimizer].state_names(float(settings.momentum)))
    while first < len(tasks):
        last, size, steps = first, 0, 0
        while last < len(tasks):
            count = tasks[last].last_step - tasks[last].first_step
            size += 4 * (parameters * (1 + states) + count)
            steps += count
            seconds = steps / found.places * found.microseconds / 1e6
            if last - first >= found.places and (size > LAUNCH_BYTES or seconds > LAUNCH_SECONDS):
                last -= (last - first) % found.places
                break
            last += 1
        yield tasks[first:last]
        first = last


class Launch:
    """Some of the members, whose memory is on the device together: one launch, or several in turns (slices.py)."""

    def __init__(
        self, tasks: Sequence[MemberTask], found: MembersPlan, kernel: LoadedKernel, rows: SharedRows,
        summing: LoadedKernel | None,
    ) -> None:  # fmt: skip
        from onelaunch.engines.resident.pinned import MappedArray

        self.tasks, self.found, self.kernel = tasks, found, kernel
        self.device = tasks[0].run.device
        self._launches = launches_of(tasks, found.places, whole=summing is not None)
        slices = [one for launch in self._launches for one in launch]
        self._slices_of = [list[int]() for _ in tasks]  # by task: the numbers of its slices
        for number, one in enumerate(slices):
            self._slices_of[one.member].append(number)
        self._control = MappedArray(len(slices), CONTROL, self.device)
        self._first = np.array([one.first_step for one in slices], np.int64)
        self._control.array["done"] = self._first
        self._memory = MembersMemory(tasks, found.plan, rows, found.places, summing)
        self._table = self._memory.table(self._control.address, CONTROL.itemsize, slices)
        self._next = torch.zeros(len(self._launches), dtype=torch.int32, device=self.device)

    def finish(self, monitor: MembersMonitor, before: int = 0) -> list[MemberResult]:
        """Wait for the launch, and return the results. `before`: steps of earlier launches, for the report."""
        self.watch(monitor, before)
        return list(self.results())

    def start(self) -> None:
        plan, stream, first = self.found.plan, torch.cuda.current_stream(self.device), 0
        for number, launch in enumerate(self._launches):
            queue = np.zeros(1, QUEUE)
            queue["members"] = self._table.data_ptr() + first * PARAMS.itemsize
            queue["next"] = self._next.data_ptr() + 4 * number
            queue["scratch"], queue["count"] = self._memory.scratch.data_ptr(), len(launch)
            if self._memory.batch_weights:  # every task is in one piece
                steps = max(task.last_step - task.first_step for task in self.tasks)
                self._memory.batch_weights.launch(stream, steps, queue.tobytes(), len(launch))
            self.kernel.launch(
                stream, grid=min(self.found.places, len(launch)) * plan.blocks, block=plan.threads, cluster=plan.blocks,
                shared_bytes=plan.shared.size, args=[queue.tobytes()],
            )  # fmt: skip
            first += len(launch)
        self._ended = torch.cuda.Event()
        self._ended.record(stream)
        _ = self._memory.on_host

    def watch(self, monitor: MembersMonitor, before: int) -> None:
        """Report progress, `before` steps of earlier launches included, and pass a stop on until the launch has ended."""
        control, reported = self._control.array, 0.0
        try:
            while not self._ended.query():
                now = time.perf_counter()
                if now - reported > 0.05:
                    reported = now
                    monitor.report(before + self.steps)
                if monitor.stop or control["fault"].any():
                    control["stop"] = 1
                time.sleep(POLL_SECONDS)
        finally:
            self.abandon()
        self._raise_on_fault()
        monitor.report(before + self.steps)

    def abandon(self) -> None:
        """Stop the launch and wait for its end: the memory of a running kernel must not be freed."""
        if not self._ended.query():
            self._control.array["stop"] = 1
            self._ended.synchronize()

    @property
    def steps(self) -> int:
        """Steps done so far by all members."""
        return int((self._control.array["done"].astype(np.int64) - self._first).sum())

    def _raise_on_fault(self) -> None:
        faults = np.flatnonzero(self._control.array["fault"])
        if not len(faults):
            return
        control = self._control.array[faults[0]]
        task = next(task for task, own in zip(self.tasks, self._slices_of, strict=True) if faults[0] in own)
        what = self.found.plan.exchange_names().get(int(control["fault"]) - 1, "its rows")
        raise OnelaunchError(
            f"engine='resident' stopped: member {task.index} timed out waiting for {what} at step "
            f"{control['fault_step']}; another program may hold the GPU: try again, or pass engine='eager'"
        )

    def results(self) -> Iterator[MemberResult]:
        """The results of the members that have finished, or whose loss stopped being finite."""
        (losses, broken), records = self._memory.losses(), self._memory.records()
        weights = self._memory.weights_of_batches()
        done = [number for number in range(len(self.tasks)) if self._is_done(number, number in broken)]
        self._memory.write_back(done)
        for number in done:
            of_batches = None if weights is None else weights[number]
            segments = tuple(self._segments(number, losses[number], records[number], of_batches, broken.get(number)))
            task = self.tasks[number]
            ends = task.last_step >= task.run.spec.total_steps
            yield MemberResult(task.index, segments, {} if ends else self._memory.state(number))

    def _is_done(self, number: int, broken: bool) -> bool:
        control = self._control.array[self._slices_of[number]]
        return bool(control["finished"].all()) and (broken or int(control["done"][-1]) == self.tasks[number].last_step)

    def _segments(
        self, number: int, losses: torch.Tensor, records: np.ndarray, weights: torch.Tensor | None, broken: int | None
    ) -> Iterator[Segment]:  # fmt: skip
        """`broken`: the position of the first loss that is not finite, after which nothing means anything."""
        task, control = self.tasks[number], self._control.array[self._slices_of[number]]
        run, spec = task.run, task.run.spec
        step, end = task.first_step, int(control["done"][-1])
        if broken is not None:
            end = task.first_step + broken + 1
        starts = list(range(step - step % spec.steps_per_epoch, end, spec.steps_per_epoch))
        starts[0] = step  # a task may begin within an epoch
        sizes = np.diff([*starts, end]).tolist()
        parts = losses[: end - step].split(sizes)
        sums = [None] * len(parts) if weights is None else weights[: end - step].clone().split(sizes)
        recorded = min(int(control["epochs"].sum()), len(starts))
        if recorded == len(starts) and end != spec.epoch_end(starts[-1]):
            recorded -= 1  # the last epoch is not complete
        correct = [*records["correct"][:recorded].tolist(), int(control["correct"][-1])] if has_accuracy(spec) else None
        validated: list[Metrics] = []
        if run.validation is not None:
            rows, columns = len(run.validation[0]), ("validation_loss", "validation_correct")
            for loss, hits in zip(*(records[name][:recorded].tolist() for name in columns), strict=True):
                validated.append(Metrics.of(spec, loss, hits, rows, run.outputs))
        for epoch, (first, part) in enumerate(zip(starts, parts, strict=True)):
            yield Segment(
                first, part, None if correct is None else correct[min(epoch, recorded)],
                validated[epoch] if epoch < len(validated) else None, sums[epoch],
            )  # fmt: skip
