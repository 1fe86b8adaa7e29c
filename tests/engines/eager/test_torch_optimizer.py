"""The state of PyTorch's optimizers in checkpoints, of the eager engine and of engines that keep no step count."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from onelaunch.engines.eager.torch_optimizer import optimizer_state, restore_optimizer, set_step_counts
from onelaunch.optimizers import OPTIMIZERS as TABLE
from onelaunch.run.spec import Spec
from onelaunch.train.checkpoint import load_checkpoint, save_checkpoint
from tests.reference import OPTIMIZERS
from tests.train.checkpointed import network, run, same

pytest.importorskip("safetensors")
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_checkpoint_of_another_engine_resumes_to_the_same_bits(tmp_path, optimizer):
    """Native engines save the shared state alone: PyTorch's own `step` is set from the number of steps done."""
    options, path = OPTIMIZERS[optimizer], tmp_path / "run.safetensors"
    whole, resumed = network(), network()
    expected = run(whole, epochs=3, **options)
    run(network(), epochs=1, checkpoint=path, **options)
    saved = load_checkpoint(path)
    saved.state = {name: tensor for name, tensor in saved.state.items() if not name.startswith("engine.")}
    names = TABLE[options["optimizer"]].state_names(options.get("momentum", 0.0))
    assert {name.split(".", 1)[0] for name in saved.state} == set(names)
    save_checkpoint(path, saved)
    history = run(resumed, epochs=3, checkpoint=path, resume=True, **options)
    assert history.losses == expected.losses
    assert same(resumed, whole)


@pytest.mark.parametrize("name", TABLE)
def test_state_survives_a_round_trip(name):
    spec = Spec(rows=8, steps=1, optimizer=name, momentum=0.9 if "momentum" in TABLE[name].arguments else 0.0)
    parameters = {"weight": nn.Parameter(torch.randn(3))}
    made, restored = (TABLE[name].make([*parameters.values()], spec, 0.1, False) for _ in range(2))
    for _ in range(2):
        parameters["weight"].grad = torch.randn(3)
        made.step()
    state = optimizer_state(made, parameters)
    restore_optimizer(restored, parameters, state, torch.device("cpu"))
    assert state.keys() == optimizer_state(restored, parameters).keys()
    for key, tensor in optimizer_state(restored, parameters).items():
        assert torch.equal(tensor, state[key])
        assert tensor.data_ptr() != state[key].data_ptr(), "a clone: training must not change a checkpoint"


def test_a_restored_step_count_stays():
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.RMSprop([parameter])
    optimizer.state[parameter]["square_avg"] = torch.zeros(3)
    set_step_counts(optimizer, 7, torch.device("cpu"))
    set_step_counts(optimizer, 9, torch.device("cpu"))
    assert optimizer.state[parameter]["step"] == 7
