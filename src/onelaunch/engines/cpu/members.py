"""Many runs at once on the CPU: every thread trains one member after another, each in single-thread code.

A member has the partitions that it would have alone, all executed by one thread, so its bits are those of `fit`. Members of
equal settings share the program, and on a thread also the arena and the table. Short epochs run whole in native calls: row
order, steps and validation, without the Python interpreter in between. Long epochs run in calls of about 50 ms, as in `fit`,
so that a stop is served soon.
"""

from __future__ import annotations

import copy
import ctypes
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from onelaunch.engines.contract import Metrics, Run, Segment, State
from onelaunch.engines.cpu.code import driver
from onelaunch.engines.cpu.code.units import ROW_ORDER
from onelaunch.engines.cpu.plan.layout import MAX_CALL_STEPS
from onelaunch.engines.cpu.plan.settings import SCALARS, TALLY, Settings
from onelaunch.engines.cpu.session import CALL_SECONDS, CpuSession, settings_for
from onelaunch.engines.cpu.threads import Team
from onelaunch.engines.members import MemberResult, MembersMonitor, MemberTask
from onelaunch.integers import clamp
from onelaunch.optimizers import OPTIMIZERS
from onelaunch.rng import permutation_bits, signed_seed
from onelaunch.run.objective import has_accuracy
from onelaunch.run.spec import Spec
from onelaunch.run.step_scalars import row_weights

MAX_SESSIONS = 8  # per thread: arenas that wait for a member of their settings
MAX_SCALARS = 256  # tables of per-step scalars; members that differ in seed or rows alone share one
MAX_EPOCH_SECONDS = 0.3  # of an epoch that runs whole in one native call, which no stop can end
POLL_SECONDS = 0.05  # how often the calling thread serves signals and progress


def members_plan(runs: Sequence[Run]) -> str:
    """How many members run at once, for people."""
    threads = min(len(runs), torch.get_num_threads())
    return f"{threads} members at once, each in single-thread code on the CPU"


def train_members(tasks: Sequence[MemberTask], monitor: MembersMonitor) -> Iterator[MemberResult]:
    """Train every task on PyTorch's number of threads, and yield each result when it is done."""
    waiting: queue.SimpleQueue[MemberTask | None] = queue.SimpleQueue()
    done: queue.SimpleQueue[MemberResult | BaseException | None] = queue.SimpleQueue()
    for task in tasks:
        waiting.put(task)
    count = max(1, min(len(tasks), torch.get_num_threads()))
    work = _Work(monitor, waiting, done)
    threads = [threading.Thread(target=work.serve, name=f"onelaunch-member-{n}", daemon=True) for n in range(count)]
    for thread in threads:
        waiting.put(None)  # ends one of them
        thread.start()
    try:
        running = count
        while running:
            try:
                found = done.get(timeout=POLL_SECONDS)
            except queue.Empty:
                monitor.report(work.steps)
                continue
            if found is None:
                running -= 1
            elif isinstance(found, BaseException):
                raise found
            else:
                monitor.report(work.steps)
                yield found
    finally:
        work.ended = True
        for thread in threads:
            thread.join()


class _Work:
    """What the threads of one call share."""

    def __init__(self, monitor: MembersMonitor, waiting: Any, done: Any) -> None:
        self.monitor, self.waiting, self.done = monitor, waiting, done
        self.steps = 0  # of all tasks; an update may get lost between threads, which is accurate enough for a bar
        self.ended = False

    @property
    def stop(self) -> bool:
        return self.ended or self.monitor.stop

    def report(self, step: int, loss: float, correct: int | None) -> None:
        """The engine's Monitor of one member, which has nothing to show."""

    def serve(self) -> None:
        sessions: OrderedDict[Settings, MemberSession] = OrderedDict()
        try:
            while not self.stop and (task := self.waiting.get()) is not None:
                result = self._train(task, sessions)
                if result is not None:
                    self.done.put(result)
        except BaseException as error:
            self.done.put(error)
        self.done.put(None)

    def _train(self, task: MemberTask, sessions: OrderedDict[Settings, MemberSession]) -> MemberResult | None:
        settings = settings_for(task.run)
        session = sessions.pop(settings, None)
        state: Mapping[str, Any] = task.state
        if session is None or not session.bind(task.run, state):
            session = MemberSession(task.run, state)
        sessions[settings] = session
        if len(sessions) > MAX_SESSIONS:
            sessions.popitem(last=False)
        segments = session.train(task.first_step, task.last_step, self)
        if segments is None:
            return None
        final: State = {}
        if task.last_step < task.run.spec.total_steps:
            final = session.snapshot()
        else:
            session.close()
        return MemberResult(task.index, segments, final)


class MemberSession(CpuSession):
    """A session that executes all partitions on the calling thread, and serves one run after another."""

    def __init__(self, run: Run, state: Mapping[str, torch.Tensor]) -> None:
        super().__init__(run, state)
        self.team = Team(1, lambda: None)
        self._room = run.spec.rows
        self._row_order_address = self.library.address(ROW_ORDER, "row_order")
        self._epochs = self.library.function(driver.UNIT, driver.EPOCHS, ctypes.c_void_p, ctypes.c_void_p)
        numbers = range(self._plan.partitions)
        offsets = {
            kind: [self.arena.address + self._plan.buffers[f"{kind}.{number}"].offset for number in numbers]
            for kind in ("losses", "tally")
        }
        self._partition_buffers = {kind: np.array(found, np.int64) for kind, found in offsets.items()}
        self._pace = 0.0  # seconds per step of the last whole epoch, its validation included; 0 before the first

    def bind(self, run: Run, state: Mapping[str, torch.Tensor]) -> bool:
        """Serve another run of the same settings; False if its rows do not fit into the arena."""
        if run.spec.rows > self._room:
            return False
        self.run, self.spec = run, run.spec
        self._tensors = dict(run.model.state_dict(keep_vars=True))
        self._done = 0
        self._has_results = False
        self._weight_sums = None
        self.arena.order[run.spec.rows :] = (
            0  # numbers past the end are read, and those of another run may be too large
        )
        self._load(state)
        self._table.bind(self._outside())
        return True

    def train(self, first_step: int, last_step: int, work: _Work) -> tuple[Segment, ...] | None:
        """The segments of these steps; None if a stop was requested before their end."""
        spec, found = self.spec, []
        self._set_counters(first_step)
        step = first_step
        while step < last_step:
            whole = 0 if step % spec.steps_per_epoch else (last_step - step) // spec.steps_per_epoch
            count = self._call_epochs(whole)
            begin = time.perf_counter()
            segments = self._whole_epochs(step, count) if count else [self._segment(step, work)]
            if whole and not work.stop:
                self._pace = (time.perf_counter() - begin) / (self._done - step)
            found += segments
            work.steps += self._done - step
            step = self._done
            if not np.isfinite(found[-1].losses[-1].item()):
                break
            if work.stop and step < last_step:
                return None
        return tuple(found)

    @property
    def _is_plain(self) -> bool:
        """Whether native code needs nothing from Python between epochs."""
        return self.run.weights is None and self.run.train_rows is None

    def _call_epochs(self, whole: int) -> int:
        """How many whole epochs the next native call has, at most `whole`; 0 where an epoch needs several calls."""
        most = min(whole, MAX_CALL_STEPS // self.spec.steps_per_epoch)
        seconds = self._pace * self.spec.steps_per_epoch
        if not most or not self._is_plain or not 0 < seconds < MAX_EPOCH_SECONDS:
            return 0
        return clamp(1, int(CALL_SECONDS / seconds), most)

    def _whole_epochs(self, first_step: int, count: int) -> list[Segment]:
        spec, plan = self.spec, self._plan
        steps, partitions = spec.steps_per_epoch, plan.partitions
        first_epoch = first_step // steps
        losses = np.empty((partitions, count, steps), np.float64)
        tallies = np.empty((count, partitions, len(TALLY)), np.int64)
        scalars = _scalars(_schedule_of(spec), first_step, count, self.run.outputs)
        validates = self.run.validation is not None
        fields = {
            "train": self._table.entries["train.alone"],
            "validate": self._table.entries["validate.alone"] if validates else 0,
            "call": self.arena.address + plan.buffers["call.train"].offset, "row_order": self._row_order_address,
            "order": self.arena.order.ctypes.data, "rows": spec.rows, "bits": permutation_bits(spec.rows),
            "seed": signed_seed(spec.seed), "steps": steps, "scalars": scalars.ctypes.data, "first_epoch": first_epoch,
            "count": count, "partitions": partitions, "losses": self._partition_buffers["losses"].ctypes.data,
            "tallies": self._partition_buffers["tally"].ctypes.data, "all_losses": losses.ctypes.data,
            "all_tallies": tallies.ctypes.data,
        }  # fmt: skip
        words = np.array([fields[name] for name in driver.EPOCHS.fields], np.int64)
        self._has_results = False
        self._epochs(words.ctypes.data, None)
        self._has_results = True
        self._done = first_step + count * steps
        means = losses.sum(axis=0) * row_weights(spec, first_step, steps, self.run.outputs)
        each = torch.from_numpy(means.astype(np.float32))
        accurate = has_accuracy(spec)
        correct = tallies[:, :, TALLY.index("correct")].sum(axis=1).tolist()
        metrics = self._metrics(tallies) if validates else [None] * count
        return [
            Segment(first_step + number * steps, each[number], correct[number] if accurate else None, metrics[number])
            for number in range(count)
        ]

    def _metrics(self, tallies: np.ndarray[Any, Any]) -> list[Metrics | None]:
        """The validation of each epoch, from tallies int64 [epochs, partitions, entries]."""
        assert self.run.validation is not None
        rows, outputs = len(self.run.validation[0]), self.run.outputs
        losses = np.zeros(len(tallies))
        for partition in range(tallies.shape[1]):  # in the order in which a single run adds them
            losses += tallies[:, partition, TALLY.index("validation_loss")].view(np.float64)
        correct = tallies[:, :, TALLY.index("validation_correct")].sum(axis=1).tolist()
        return [
            Metrics.of(self.spec, loss, hits, rows, outputs)
            for loss, hits in zip(losses.tolist(), correct, strict=True)
        ]


def _schedule_of(spec: Spec) -> Spec:
    """The Spec without what the per-step scalars do not depend on, so that members of all seeds share them."""
    found = copy.copy(spec)
    for name, value in (("seed", 0), ("class_weight", None), ("metrics", ()), ("early_stopping", None)):
        object.__setattr__(found, name, value)
    return found


@lru_cache(MAX_SCALARS)
def _scalars(spec: Spec, first_step: int, count: int, outputs: int) -> np.ndarray[Any, Any]:
    """The per-step scalars of `count` whole epochs, float32 [steps, len(SCALARS)], as `step_scalars` computes them."""
    steps = range(first_step, first_step + count * spec.steps_per_epoch)
    rates = (
        np.full(len(steps), spec.lr) if spec.schedule == "constant" else np.array([spec.lr_at(step) for step in steps])
    )
    found = OPTIMIZERS[spec.optimizer].step_scalars(spec, rates, np.arange(steps.start, steps.stop, dtype=np.float64))
    found["row_weight"] = np.tile(row_weights(spec, first_step, spec.steps_per_epoch, outputs), count)
    return np.stack([found[name] for name in SCALARS], 1).astype(np.float32)
