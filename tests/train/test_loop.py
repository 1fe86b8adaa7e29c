"""A run that was stopped, even by kill -9, resumes to the same bits, and what it had trained is not lost."""

from __future__ import annotations

import itertools
import signal
import time

import pytest
import torch
from torch import nn

import onelaunch as ol
from onelaunch.train.checkpoint import load_checkpoint
from onelaunch.train.fit import fit_with
from onelaunch.train.loop import Listener
from tests import preloaded
from tests.reference import OPTIMIZERS, problem
from tests.train.checkpointed import data, network, run, same, train_for_long

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


def press_ctrl_c(model: nn.Sequential, at_call: int) -> nn.Sequential:
    """The model, which presses Ctrl-C in one of its forward passes: a trial, then five per epoch and one for validation."""
    calls = itertools.count(1)
    model[0].register_forward_hook(lambda *_: signal.raise_signal(signal.SIGINT) if next(calls) == at_call else None)
    return model


def test_ctrl_c_saves_within_the_epoch_and_resumes_to_the_same_bits(tmp_path):
    whole, stopped = network(), press_ctrl_c(network(), at_call=10)
    expected = run(whole)
    path = tmp_path / "run.safetensors"
    with pytest.raises(KeyboardInterrupt):
        run(stopped, checkpoint=path)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    saved = load_checkpoint(path)
    assert saved.step == 8  # three steps into the second epoch
    assert all(torch.equal(saved.model[name], tensor) for name, tensor in stopped.state_dict().items())
    resumed = network()
    history = run(resumed, checkpoint=path, resume=True)
    assert history.losses == expected.losses
    assert same(resumed, whole)
    assert [epoch["accuracy"] for epoch in history.epochs] == [epoch["accuracy"] for epoch in expected.epochs]


def test_kill_minus_9_leaves_a_complete_checkpoint(tmp_path):
    path, output = tmp_path / "run.safetensors", tmp_path / "output"
    for delay in (0.1, 0.23, 0.4):
        process = preloaded.start(train_for_long, path, output=output)
        while not path.exists() and process.exitcode is None:
            time.sleep(0.01)
        time.sleep(delay)
        assert process.exitcode is None, output.read_text()
        process.kill()
        process.join()
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
    options = {"loss": "mse", "optimizer": "sgd", "lr": 30.0, "batch_size": 150, "engine": "eager", "progress": False}
    with pytest.raises(ol.DivergedError, match=r"step \d+.*last good checkpoint is") as caught:
        ol.fit(model, x, y, epochs=2000, checkpoint=path, **options)
    saved = load_checkpoint(path)
    assert 0 < saved.step <= caught.value.step
    assert all(torch.isfinite(tensor).all() for tensor in saved.model.values())
    assert torch.isfinite(saved.losses).all()


class Interrupts(Listener):
    """Presses Ctrl-C, or raises another error, after an epoch."""

    def __init__(self, epoch, error=None):
        self.at, self.error = epoch, error

    def epoch(self, history, record):
        if len(history.epochs) == self.at:
            if self.error:
                raise self.error
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("engine", ["cpu", "eager"])
@pytest.mark.parametrize("error", [None, RuntimeError("of the listener")])
def test_the_model_keeps_what_was_trained_before_ctrl_c_or_an_error(engine, error):
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
        assert len(run(press_ctrl_c(network(), at_call=10)).losses) == 30
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
