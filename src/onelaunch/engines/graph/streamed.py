"""A run whose rows stay in host memory: two chunks of rows on the device, one filled while the other is trained on.

The device reads the rows from page-locked host memory itself, in the order of the epoch, on a stream of its own. Kernels see a
chunk as a small epoch: its rows lie in the order in which they are visited. Row order and bits are those of rows on the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch

from onelaunch.engines.contract import Monitor, Segment
from onelaunch.engines.graph.kernels.gather import gather_rows
from onelaunch.engines.graph.kernels.run_state import fill_row_order
from onelaunch.engines.graph.scalars import make_table
from onelaunch.engines.graph.session import GraphSession
from onelaunch.engines.graph.step import Data
from onelaunch.engines.graph.transfer import Pending, correct_predictions, upload
from onelaunch.errors import UnsupportedError, first_line
from onelaunch.integers import clamp
from onelaunch.run.objective import has_accuracy
from onelaunch.run.step_scalars import step_scalars

CHUNK_BYTES = 2**28  # of rows; there are two chunks
READ_ONLY = 8  # cudaHostRegisterReadOnly, for a memory-mapped file


class StreamedSession(GraphSession):
    def _window(self) -> tuple[int, int]:
        """Rows and steps of a chunk."""
        run, spec = self.run, self.spec
        batch_bytes = self.batch * run.x[0].numel() * run.x.element_size()
        steps = clamp(1, CHUNK_BYTES // batch_bytes, spec.steps_per_epoch)
        return steps * self.batch, steps

    def _make_banks(self) -> list[Data]:
        run, (rows, self._chunk_steps) = self.run, self._window()
        device = run.device
        self._host = HostRows(run.x.flatten(1), device)
        self._order = torch.empty(self.spec.rows, dtype=torch.int32, device=device)
        first = self._data(self._chunk(rows), self._like(run.y, rows), "")
        first = replace(first, weights=None if run.weights is None else self._like(run.weights, rows))
        first.order.copy_(torch.arange(rows, dtype=torch.int32))
        copies = {name: getattr(first, name).clone() for name in ("x", "y", "order", "control", "table")}
        second = replace(first, **copies, weights=None if first.weights is None else first.weights.clone())
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None
        # Of each chunk: its rows are there, and no longer needed.
        self._fetched, self._trained = ([torch.cuda.Event() for _ in range(2 if self._side else 0)] for _ in range(2))
        self._filled = 0  # the chunk that was filled last
        self._ahead: int | None = None  # the first step of its rows
        self._order_epoch: int | None = None  # the epoch whose order is in `_order`
        self.plan += (
            f"\nrows in host memory: two chunks of {self._chunk_steps} steps, one fetched while the other trains"
        )
        return [first, second]

    def _chunk(self, rows: int) -> torch.Tensor:
        if "data" in self._step_plan.buffers:
            return self.buffers.take("data")
        return torch.empty(rows, self._host.rows.shape[1], dtype=self.run.x.dtype, device=self.run.device)

    def _like(self, tensor: torch.Tensor, rows: int) -> torch.Tensor:
        return torch.zeros(rows, *tensor.shape[1:], dtype=tensor.dtype, device=self.run.device)

    def segments(self, first_step: int, monitor: Monitor) -> Iterator[Segment]:
        step = first_step
        while step < self.spec.total_steps:
            with torch.no_grad(), torch.cuda.device_of(self.run.y):
                segment = self._stream(step, monitor)
            yield segment
            step += len(segment.losses)

    def _stream(self, first_step: int, monitor: Monitor) -> Segment:
        """One epoch, or the rest of it, chunk by chunk."""
        spec, calls = self.spec, self.buffers.calls
        end = spec.epoch_end(first_step)
        self._note_weights(spec.epoch_of(first_step))
        first, done = first_step, list[Pending]()
        while first < end:
            if self._ahead != first:
                self._fetch(first)
            bank, last = self._filled, self._chunk_end(first)
            if last < spec.total_steps:  # also the first rows of the next epoch
                self._fetch(last)
            self._train(bank, first, last)
            losses = self.buffers.take("losses")[: last - first]
            done.append(Pending(first, last, losses, self.data.control))
            if last == end and self.run.validation is not None:
                done[-1].validation = self._queue_evaluation()
            done[-1].close()
            first = last
            if len(done) > 1 and self._ends(done[-2], done, monitor):  # while the device trains on
                break
        self._count(self.buffers.calls - calls)
        for pending in done:
            pending.wait()
        parts = [self._result(pending) for pending in done]
        correct = sum(correct_predictions(pending.control) for pending in done) if has_accuracy(spec) else None
        losses = torch.cat([part.losses for part in parts])
        monitor.report(done[-1].end, float(losses[-1]), correct)
        weights = [part.weights for part in parts if part.weights is not None]
        return Segment(first_step, losses, correct, parts[-1].validation, torch.cat(weights) if weights else None)

    def _ends(self, finished: Pending, done: list[Pending], monitor: Monitor) -> bool:
        """Report a chunk's results; whether the run is to stop after the chunk that is queued."""
        finished.wait()
        loss = float(finished.losses[-1])
        correct = sum(correct_predictions(pending.control) for pending in done[:-1])
        monitor.report(finished.end, loss, correct if has_accuracy(self.spec) else None)
        return monitor.stop or loss != loss

    def _chunk_end(self, first: int) -> int:
        return min(first + self._chunk_steps, self.spec.epoch_end(first))

    def _fetch(self, first: int) -> None:
        """Fill the other chunk with the rows of the steps from `first` on, on a stream of its own."""
        spec, run = self.spec, self.run
        if self._side and self._ahead is None:
            self._side.wait_stream(torch.cuda.current_stream(run.device))
        self._filled, self._ahead = 1 - self._filled, first
        data, epoch = self._banks[self._filled], spec.epoch_of(first)
        begin = first % spec.steps_per_epoch * spec.batch_size
        end = spec.batch_slice(self._chunk_end(first) - 1).stop
        with self._on_side():
            if self._order_epoch != epoch:
                fill_row_order(self._order, self.buffers.take("keys"), spec.seed, epoch)
                self._order_epoch = epoch
            if self._side:
                self._side.wait_event(self._trained[self._filled])
            rows = self._order[begin:end]
            gather_rows(self._host.rows, rows, data.x[: end - begin])
            for source, target in ((run.y, data.y), (run.weights, data.weights)):
                if source is not None and target is not None:
                    torch.index_select(source, 0, rows, out=target[: end - begin])
            if self._side:
                self._fetched[self._filled].record(self._side)

    def _on_side(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._side) if self._side else nullcontext()

    def _train(self, bank: int, first: int, last: int) -> None:
        """Queue the steps [first, last) of the run, whose rows are in a chunk."""
        spec, self._bank = self.spec, bank
        stream = torch.cuda.current_stream(self.run.device) if self._side else None
        if stream:
            stream.wait_event(self._fetched[bank])
        inside = first % spec.steps_per_epoch
        sums = self._sums.get(spec.epoch_of(first))
        sums = None if sums is None else sums[inside : inside + last - first]
        scalars = step_scalars(spec, first, last - first, self.run.outputs, sums)
        upload(make_table(spec, len(self.data.table), scalars), self.data.table)
        upload(torch.tensor([0, first, 0, 0]), self.data.control)  # as CONTROL
        self._queue(last - first)
        if stream:
            self._trained[bank].record(stream)

    def close(self) -> None:
        if not self._closed and self._side:
            torch.cuda.synchronize(self.run.device)
        super().close()
        self._host.close()


class HostRows:
    """Rows in page-locked host memory, as a tensor that the device reads without a copy."""

    def __init__(self, x: torch.Tensor, device: torch.device) -> None:
        self.rows, self._registered = x.contiguous(), 0
        if device.type != "cuda":
            return
        if not self.rows.is_pinned():
            self._register(device)
        self._kept = self.rows
        self.rows = torch.as_tensor(_HostMemory(self.rows), device=device)

    def _register(self, device: torch.device) -> None:
        """Page-lock the rows where they are, or copy them into page-locked memory where the system refuses that."""
        runtime, address, size = torch.cuda.cudart(), self.rows.data_ptr(), self.rows.nbytes
        for flags in (0, READ_ONLY):
            if int(runtime.cudaHostRegister(address, size, flags)) == 0:
                self._registered = address
                return
            with suppress(RuntimeError):  # the next kernel would report the refusal as an error of its own
                torch.ones((), device=device)
        try:
            self.rows = self.rows.pin_memory()
        except RuntimeError as error:
            raise UnsupportedError(f"x cannot be page-locked for the device to read ({first_line(error)})") from error

    def close(self) -> None:
        if self._registered:
            torch.cuda.cudart().cudaHostUnregister(self._registered)
            self._registered = 0


class _HostMemory:
    """What PyTorch needs to wrap page-locked host memory in a tensor of the device."""

    def __init__(self, x: torch.Tensor) -> None:
        kind = "|u1" if x.dtype == torch.uint8 else "<f4"
        self.__cuda_array_interface__ = {
            "shape": tuple(x.shape), "typestr": kind, "data": (x.data_ptr(), False), "version": 3
        }  # fmt: skip
