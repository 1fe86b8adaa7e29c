"""The host's side of a resident run. A thread replaces the kernel: it reads the same parameters and writes the same words.

The computation of the kernel is tested on a GPU (`test_resident.py`); here it only follows the protocol.
"""

from __future__ import annotations

import ctypes
import dataclasses
import re
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from onelaunch.device import H200
from onelaunch.engines.contract import Metrics
from onelaunch.engines.resident import session as host
from onelaunch.engines.resident.buffers import Buffers
from onelaunch.engines.resident.plan.placement import choose_plan
from onelaunch.engines.resident.source.source_common import HEADERS
from onelaunch.errors import OnelaunchError
from onelaunch.nvrtc.compile import Cubin
from onelaunch.rng import permutation
from onelaunch.train.inputs import make_run

WIDTHS = [6, 8, 8, 3]


def words_at(address: int, count: int, dtype: Any) -> Any:
    buffer = (ctypes.c_uint8 * (count * np.dtype(dtype).itemsize)).from_address(address)
    return np.frombuffer(buffer, dtype)


class Stream:
    """A CUDA stream whose only work is the thread of the launch."""

    def __init__(self, *_: Any) -> None:
        self.work: threading.Thread | None = None

    def wait_stream(self, other: Stream) -> None:
        other.synchronize()

    def synchronize(self) -> None:
        if self.work:
            self.work.join()


class Event:
    def record(self, stream: Stream) -> None:
        self.stream = stream

    def query(self) -> bool:
        return self.stream.work is not None and not self.stream.work.is_alive()

    def synchronize(self) -> None:
        self.stream.synchronize()


class Kernel:
    """Writes 1 / (step + 1) as the loss of a step, polls the host every eight steps, and sets the weights to the steps done."""

    registers, local_bytes = 1, 0
    fault: tuple[int, int] | None = None
    at_once = 1000
    launched: list[tuple[int, int]]

    def __init__(self, _: Cubin, name: str, device: torch.device) -> None:
        assert name == "train"
        type(self).launched = []

    def max_active_clusters(self, **_: Any) -> int:
        return self.at_once

    def launch(self, stream: Stream, *, args: list[bytes], **_: Any) -> None:
        params = np.frombuffer(args[0], host.PARAMS)[0]
        self.launched.append((int(params["first_step"]), int(params["last_step"])))
        stream.work = threading.Thread(target=self.run, args=(params,))
        stream.work.start()

    def run(self, params: np.void) -> None:
        first, last, each = (int(params[name]) for name in ("first_step", "last_step", "steps_per_epoch"))
        control = words_at(int(params["control"]), 1, host.CONTROL)
        losses = words_at(int(params["losses"]), last - first, np.float32)
        step = first
        while step < last:
            if step % 8 == 0 and control["stop"][0]:
                break
            losses[step - first] = 1 / (step + 1)
            step += 1
            if step % each == 0 or step == int(params["total_steps"]):
                record = words_at(
                    int(params["records"]) + int(control["epochs"][0]) * host.RECORD.itemsize, 1, host.RECORD
                )
                record["correct"], record["validation_loss"], record["validation_correct"] = step, step * 2.0, 1
                control["epochs"] += 1
            time.sleep(0.0002)
        weights = words_at(int(params["weights"]), 6 * 8 + 8, np.float32)
        weights[:] = step
        if self.fault:
            control["fault"], control["fault_block"], control["fault_step"] = 1 + self.fault[0], 3, self.fault[1]
        control["correct"], control["done"] = 7, step


class SumWeights:
    """Adds up the weights beside the targets in the order of `ol.permutation`, as cuda/batch_weights.cuh does."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def launch(self, stream: Stream, *, args: list[bytes], grid: int, block: int) -> None:
        params = np.frombuffer(args[0], host.PARAMS)[0]
        first, last, each, rows = (int(params[name]) for name in ("first_step", "last_step", "steps_per_epoch", "rows"))
        assert grid * block // 32 >= last - first
        weights = words_at(int(params["y"]), rows * 2, np.float32).reshape(rows, 2)[:, 1].astype(np.float64)
        sums = words_at(int(params["batch_weights"]), last - first, np.float64)
        for step in range(first, last):
            order = permutation(rows, int(params["seed"]), step // each)
            sums[step - first] = weights[order[step % each * 10 : (step % each + 1) * 10]].sum()


class Memory:
    def __init__(self, count: int, dtype: Any, device: torch.device) -> None:
        self.array = np.zeros(count, dtype)
        self.address = self.array.ctypes.data


class Monitor:
    def __init__(self, stop_after: int | None = None) -> None:
        self.stop, self._after, self.reports = stop_after == 0, stop_after, 0

    def report(self, step: int, loss: float, correct: int | None) -> None:
        self.reports += 1
        self.stop = self.stop or (self._after is not None and self.reports >= self._after)


@pytest.fixture
def protocol(monkeypatch: pytest.MonkeyPatch) -> type[Kernel]:
    from onelaunch.engines.resident import pinned
    from onelaunch.nvrtc import launch

    def load(cubin: Cubin, name: str, device: torch.device) -> Kernel | SumWeights:
        return SumWeights(device) if name == "sum_weights" else Kernel(cubin, name, device)

    monkeypatch.setattr(launch, "load", load)
    monkeypatch.setattr(pinned, "MappedArray", Memory)
    monkeypatch.setattr(host, "chip_of", lambda device: H200)
    monkeypatch.setattr(host, "architecture", lambda device: "sm_90a")
    monkeypatch.setattr(host, "compile_cubin", lambda source, arch, headers: Cubin(b"", 0.0, cached=True, log=""))
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream())
    monkeypatch.setattr(Kernel, "fault", None)
    monkeypatch.setattr(Kernel, "at_once", 1000)
    return Kernel


def make(checkpoints: bool = False, sample_weight: torch.Tensor | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    x, y = torch.randn(100, 6), torch.randint(3, (100,))
    settings = {"batch_size": 10, "optimizer": "sgd", **options}
    run = make_run(model, x, y, (x[:10], y[:10]), settings, sample_weight=sample_weight)
    return dataclasses.replace(run, checkpoints=checkpoints)


def test_a_run_is_one_launch_and_one_segment_per_epoch(protocol):
    run = make(steps=25)
    session = host.ResidentSession(run, {})
    segments = list(session.segments(0, Monitor()))
    assert protocol.launched == [(0, 25)]
    assert [(part.first_step, len(part.losses), part.correct) for part in segments] == [
        (0, 10, 10),
        (10, 10, 20),
        (20, 5, 25),
    ]
    torch.testing.assert_close(torch.cat([part.losses for part in segments]), 1 / torch.arange(1, 26))
    assert segments[1].validation == Metrics(loss=20 * 2.0 / 10, accuracy=0.1)
    session.snapshot()
    assert (run.model[0].weight == 25).all()


def test_with_checkpoints_each_epoch_is_a_launch(protocol):
    run = make(checkpoints=True, steps=25)
    session = host.ResidentSession(run, {})
    for part in session.segments(0, Monitor()):
        session.snapshot()
        assert (run.model[0].bias == part.first_step + len(part.losses)).all()
    assert protocol.launched == [(0, 10), (10, 20), (20, 25)]


def test_long_runs_are_cut_where_their_losses_exceed_the_limit(protocol, monkeypatch):
    monkeypatch.setattr(host, "MAX_LOSSES", 25)
    session = host.ResidentSession(make(epochs=5), {})
    segments = list(session.segments(0, Monitor()))
    assert protocol.launched == [(0, 20), (20, 40), (40, 50)]
    torch.testing.assert_close(torch.cat([part.losses for part in segments]), 1 / torch.arange(1, 51))


@pytest.mark.parametrize("checkpoints", [False, True])
def test_segments_have_the_summed_weights_of_their_batches(protocol, checkpoints):
    weights = torch.rand(100)
    session = host.ResidentSession(make(checkpoints, weights, steps=25, seed=3), {})
    segments = list(session.segments(0, Monitor()))
    assert len(protocol.launched) == (3 if checkpoints else 1)
    for epoch, part in enumerate(segments):
        expected = weights.double()[permutation(100, 3, epoch)].reshape(10, 10).sum(1)
        torch.testing.assert_close(part.weights, expected[: len(part.losses)])
    unweighted = host.ResidentSession(make(steps=5), {})
    assert [part.weights for part in unweighted.segments(0, Monitor())] == [None]


def test_a_stop_ends_within_an_epoch(protocol):
    session = host.ResidentSession(make(epochs=100), {})
    segments = session.segments(0, Monitor(stop_after=3))
    last = next(part for part in segments if len(part.losses) < 10)
    assert last.correct == 7
    assert last.validation is None
    assert (last.first_step + len(last.losses)) % 8 == 0
    session.close()


def test_a_run_goes_on_from_the_middle_of_an_epoch(protocol):
    segments = list(host.ResidentSession(make(steps=25), {}).segments(13, Monitor()))
    assert [(part.first_step, len(part.losses)) for part in segments] == [(13, 7), (20, 5)]
    torch.testing.assert_close(segments[0].losses, 1 / torch.arange(14, 21))


def test_a_wait_that_times_out_names_the_exchange(protocol, monkeypatch):
    monkeypatch.setattr(Kernel, "fault", (0, 12))
    session = host.ResidentSession(make(steps=10), {})
    name = session.layout.exchange_names()[0]
    with pytest.raises(OnelaunchError, match=f"block 3 timed out waiting for {name} at step 12.*engine='eager'"):
        list(session.segments(0, Monitor()))


def test_a_device_that_holds_too_few_blocks_is_refused(protocol, monkeypatch):
    monkeypatch.setattr(Kernel, "at_once", 0)
    with pytest.raises(OnelaunchError, match=r"blocks at once.*engine='auto'"):
        host.ResidentSession(make(steps=10), {})


def test_close_stops_a_running_kernel(protocol):
    session = host.ResidentSession(make(epochs=1000), {})
    next(session.segments(0, Monitor()))
    session.close()
    session.close()
    assert not session._running
    assert session._control.array[0]["stop"]


def test_the_parameters_are_laid_out_as_the_kernel_reads_them():
    text = (HEADERS / "exchange.cuh").read_text()
    body = text.split("struct Params {")[1].split("\n};")[0]
    names = []
    for line in re.sub(r"//[^\n]*", "", body).split(";"):
        for name in re.findall(r"(\w+)(?:\[2\])?\s*(?:,|$)", line.strip()):
            names += [f"{name}0", f"{name}1"] if f"{name}[2]" in line else [name]
    assert "u32 keep[2 * MAX_DROPOUTS];" in body
    assert (*names[:-1], "keep", names[-1]) == host.PARAMS.names
    assert body.rstrip().endswith(
        "double* batch_weights;  // if WEIGHTED: the summed weights of each batch of the launch"
    )
    control = text.split("struct Control {")[1].split("\n};")[0]
    assert tuple(re.findall(r"(\w+)[,;]", re.sub(r"//[^\n]*", "", control))) == host.CONTROL.names


@pytest.mark.parametrize(("precision", "bits"), [("bf16", 8), ("tf32", 16), ("fp32", 24)])
def test_rows_are_planes_that_add_up(precision, bits):
    run = make(steps=5)
    plan = choose_plan(host.settings_for(run, precision), H200)
    rows = Buffers(run, plan, precision, {}).by_name["x"]
    assert rows.shape == (plan.input_planes, 100, 16)
    assert rows.dtype == torch.bfloat16
    gap = (rows.double().sum(0)[:, :6] - run.x.double()).abs()
    assert (gap <= run.x.abs() * 2.0**-bits).all()
    assert not rows[:, :, 6:].any()


def test_state_comes_back_under_the_names_it_had():
    run = make(steps=5, optimizer="adam")
    names = dict(run.model.named_parameters())
    state = {f"{kind}.{name}": torch.randn_like(p) for kind in ("exp_avg", "exp_avg_sq") for name, p in names.items()}
    plan = choose_plan(host.settings_for(run, "fp32"), H200)
    buffers = Buffers(run, plan, "fp32", state)
    found = buffers.state()
    assert set(found) == set(state)
    for name, tensor in state.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)
    before = {name: p.clone() for name, p in names.items()}
    buffers.by_name["weights"] *= 2
    buffers.write_back()
    for name, p in names.items():
        torch.testing.assert_close(p, before[name] * 2, rtol=0, atol=0)
