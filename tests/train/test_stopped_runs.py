"""A run that was stopped, however roughly, goes on to the same bits, and what it had trained is not lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import onelaunch as ol
from onelaunch.train.checkpoint import load_checkpoint
from onelaunch.train.fit import fit_with
from onelaunch.train.loop import Listener
from tests.reference import OPTIMIZERS, problem
from tests.train.checkpointed import data, network, run, same

pytest.importorskip("safetensors")
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_resume_gives_the_same_bits(tmp_path, optimizer, device):
    whole, parts = network(device), network(device)
    expected = run(whole, **OPTIMIZERS[optimizer])
    path = tmp_path / "run.safetensors"
    run(parts, epochs=2, checkpoint=path, **OPTIMIZERS[optimizer])
    fresh = network(device)
    history = run(fresh, checkpoint=path, resume=True, **OPTIMIZERS[optimizer])
    assert same(fresh, whole)
    assert history.losses == expected.losses
    strip = [{**epoch, "seconds": 0} for epoch in history.epochs]
    assert strip == [{**epoch, "seconds": 0} for epoch in expected.epochs]


def test_a_run_that_ended_within_an_epoch_can_be_extended(tmp_path):
    path = tmp_path / "run.safetensors"
    for steps in (3, 7):
        run(network(), epochs=None, steps=steps, checkpoint=path, resume=path.exists())
    resumed, whole = network(), network()
    history = run(resumed, epochs=3, checkpoint=path, resume=True)
    expected = run(whole, epochs=3)
    assert same(resumed, whole)
    assert [{**epoch, "seconds": 0} for epoch in history.epochs] == [
        {**epoch, "seconds": 0} for epoch in expected.epochs
    ]


@contextmanager
def interrupted_soon(seconds: float) -> Iterator[None]:
    """Ctrl-C after a while, and not after the block: it would end whatever runs then."""
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def test_ctrl_c_saves_within_the_epoch_and_resumes_to_the_same_bits(tmp_path):
    whole, stopped = network(), network()
    expected = run(whole, epochs=200)
    path = tmp_path / "run.safetensors"
    with interrupted_soon(0.15), pytest.raises(KeyboardInterrupt):
        run(stopped, epochs=200, checkpoint=path)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    saved = load_checkpoint(path)
    assert 0 < saved.step < len(expected.losses)
    assert all(torch.equal(saved.model[name], tensor) for name, tensor in stopped.state_dict().items())
    resumed = network()
    history = run(resumed, epochs=200, checkpoint=path, resume=True)
    assert history.losses == expected.losses
    assert same(resumed, whole)
    assert [epoch["accuracy"] for epoch in history.epochs] == [epoch["accuracy"] for epoch in expected.epochs]


KILLED = """
import sys, torch
torch.set_num_threads(1)
sys.path[:0] = {path!r}
from tests.train.checkpointed import network, run
print("started", flush=True)
run(network(), epochs=3000, checkpoint={checkpoint!r})
"""


def test_kill_minus_9_leaves_a_whole_checkpoint(tmp_path):
    path = tmp_path / "run.safetensors"
    script = textwrap.dedent(KILLED.format(path=sys.path, checkpoint=str(path)))
    for delay in (0.1, 0.23, 0.4):
        process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        deadline = time.monotonic() + 60
        while not path.exists() and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.01)
        time.sleep(delay)
        process.kill()
        process.wait()
        process.stdout.close()
        step = load_checkpoint(path).step
        end = step + 5 * 5
        whole, resumed = network(), network()
        expected = run(whole, epochs=None, steps=end)
        history = run(resumed, epochs=end // 5, checkpoint=path, resume=True)
        assert history.losses == expected.losses
        assert same(resumed, whole)
        path.unlink()


def test_a_run_that_diverges_keeps_its_last_good_checkpoint(tmp_path):
    x, y = problem("mse")
    path = tmp_path / "run.safetensors"
    model = nn.Sequential(nn.Linear(7, 4))
    options = {"loss": "mse", "lr": 30.0, "batch_size": 150, "engine": "eager", "progress": False}
    with pytest.raises(ol.DivergedError, match=r"step \d+.*last good checkpoint is") as caught:
        ol.fit(model, x, y, epochs=2000, checkpoint=path, **options)
    saved = load_checkpoint(path)
    assert 0 < saved.step <= caught.value.step
    assert all(torch.isfinite(tensor).all() for tensor in saved.model.values())
    assert torch.isfinite(saved.losses).all()


class Interrupts(Listener):
    """Ctrl-C, or another error, after an epoch."""

    def __init__(self, epoch, error=None):
        self.at, self.error = epoch, error

    def epoch(self, history, record):
        if len(history.epochs) == self.at:
            if self.error:
                raise self.error
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("engine", ["cpu", "eager"])
@pytest.mark.parametrize("error", [None, RuntimeError("of the listener")])
def test_what_was_trained_before_ctrl_c_or_an_error_is_in_the_model(engine, error):
    x, y = data()
    options = {"epochs": 4, "engine": engine}
    stopped, expected = network(), network()
    with pytest.raises(KeyboardInterrupt if error is None else RuntimeError):
        fit_with(stopped, x, y, options, progress=False, listener=Interrupts(2, error))
    fit_with(expected, x, y, {**options, "epochs": 2}, progress=False)
    assert same(stopped, expected)


@pytest.mark.parametrize("engine", ["cpu", "eager"])
def test_ctrl_c_in_the_last_steps_is_not_lost(tmp_path, engine):
    x, y = data()
    path = tmp_path / "run.safetensors"
    options = {"epochs": 2, "engine": engine}
    with pytest.raises(KeyboardInterrupt):
        fit_with(network(), x, y, options, progress=False, checkpoint=path, listener=Interrupts(2))
    whole = network()
    fit_with(whole, x, y, options, progress=False)
    saved = load_checkpoint(path).model
    assert all(torch.equal(saved[name], tensor) for name, tensor in whole.state_dict().items())


def test_an_ignored_ctrl_c_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupted_soon(0.05):
            run(network(), epochs=60)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
