"""The contenders train the same run, and what they report is measured."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from onelaunch.bench.contenders import EAGER, OurEngine, TorchLoop, contenders_for, peak_memory
from tests.bench.runs import make

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings(
        "ignore:`torch.jit:DeprecationWarning"
    ),  # PyTorch's own, when torch.compile is first used
]


def test_the_plain_loop_follows_our_engines():
    """Without dropout all contenders have the same losses, partial last batches included."""
    run = make()
    before = copy.deepcopy(run.model.state_dict())
    losses = {
        c.name: c.train(run).losses for c in (TorchLoop(run, compiled=False), OurEngine("eager"), OurEngine("cpu"))
    }
    for name, found in losses.items():
        assert len(found) == 30, name
        np.testing.assert_allclose(found, losses[EAGER], rtol=1e-4, err_msg=name)
    for name, value in run.model.state_dict().items():
        assert torch.equal(value, before[name]), "a contender trains a copy"


@pytest.mark.usefixtures("quick_compiler")
def test_the_compiled_loop_trains_the_same_losses():
    run = make(epochs=1, batch_size=100)  # one shape to compile for
    compiled, plain = (TorchLoop(run, compiled=compiled).train(run).losses for compiled in (True, False))
    np.testing.assert_allclose(compiled, plain, rtol=1e-5)


def test_a_contender_can_train_again_to_the_same_losses():
    run = make(dropout=0.3)
    for contender in (TorchLoop(run, compiled=False), OurEngine("cpu")):
        assert contender.train(run).losses == contender.train(run).losses


def test_epochs_are_timed_one_by_one():
    trained = TorchLoop(make(), compiled=False).train(make(steps=25, epochs=None))
    assert [steps for steps, _ in trained.epochs] == [10, 10, 5]
    assert all(seconds > 0 for _, seconds in trained.epochs)


def test_contenders_of_one_engine_and_of_all():
    found, absent = contenders_for(make(engine="cpu"))
    assert [contender.name for contender in found] == ["torch eager", "torch.compile", "onelaunch cpu"]
    found, absent = contenders_for(make())
    assert any(name.startswith("onelaunch") for name in absent)
    assert all(absent.values())


def test_peak_memory_sees_temporary_tensors():
    with peak_memory(torch.device("cpu")) as peak:
        torch.ones(2**24)  # 64 MiB, freed at once
    if peak.bytes is None:
        pytest.skip("this system does not report the peak of a process")
    assert 60 * 2**20 < peak.bytes < 200 * 2**20
