"""`ol.train_step` against a plain loop: on a CPU operation by operation, on a GPU as recorded graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onelaunch as ol
from onelaunch.fuse import backend
from onelaunch.step.plain_step import PlainStep
from tests.conftest import LOSS_TOLERANCE, WEIGHT_TOLERANCE
from tests.reference import assert_same_course, assert_same_weights
from tests.step.loops import batches, network, plain_losses

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-2),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3),
}
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(autouse=True)
def patched(no_code: None) -> None:
    """Without code generation."""
    torch.manual_seed(0)


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_plain_loop_gives_the_same(name: str, device: str) -> None:
    model, data = network(device), batches(30, device)
    other = copy.deepcopy(model)
    step = ol.train_step(model, F.cross_entropy, OPTIMIZERS[name](model.parameters()), clip_norm=0.5)
    losses = [float(step(x, y)) for x, y in data]
    expected = plain_losses(other, OPTIMIZERS[name](other.parameters()), data, clip=0.5)
    assert_same_course(losses, expected, LOSS_TOLERANCE * 10)
    assert_same_weights(model, other, WEIGHT_TOLERANCE)
    assert bool(step.reason) == (device == "cpu")
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_accumulation_and_a_scheduler(device: str) -> None:
    model, data = network(device), batches(24, device)
    other = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.2) for one in (model, other)]
    mine, theirs = (torch.optim.lr_scheduler.StepLR(one, 2, 0.7) for one in optimizers)
    step = ol.train_step(model, nn.CrossEntropyLoss(), optimizers[0], accumulate=3)
    losses = []
    for number, (x, y) in enumerate(data, 1):
        losses.append(float(step(x, y)))
        if number % 3 == 0:
            mine.step()
    expected = plain_losses(other, optimizers[1], data, every=3, scheduler=theirs)
    assert_same_course(losses, expected, LOSS_TOLERANCE * 10)
    assert_same_weights(model, other, WEIGHT_TOLERANCE)


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_bf16_autocast(device: str) -> None:
    model, data = network(device), batches(10, device)
    other = copy.deepcopy(model)
    step = ol.train_step(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), autocast="bf16")
    losses = [float(step(x, y)) for x, y in data]
    assert_same_course(losses, plain_losses(other, torch.optim.SGD(other.parameters(), lr=0.1), data), 0.02)


def test_a_fused_model_uncompiled_and_a_group_added_later() -> None:
    model, data = network(), batches(4)
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    step = ol.train_step(ol.fuse(model), F.cross_entropy, optimizer, clip_norm=1e-9, compile=False)
    step(*data[0])
    optimizer.add_param_group({"params": list(model[3].parameters())})
    before = copy.deepcopy(model)
    model.zero_grad()
    step(*data[1])
    assert_same_weights(model, before, 1e-8)  # the new group is clipped too


def test_numbers_of_numpy_and_names_of_types() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for name, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        step = ol.train_step(
            model, None, optimizer, clip_norm=np.float32(0.5), autocast=name, capture=False, compile=False
        )
        assert (step._plain.clip_norm, step._plain.autocast) == (0.5, dtype)
        assert type(step._plain.clip_norm) is float


def test_many_steps_do_not_share_dynamos_limit() -> None:
    """Each model is compiled: with one code object for all, Dynamo stops after 8."""
    for width in range(2, 13):
        model = nn.Linear(8, width)
        step = ol.train_step(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1))
        step(torch.randn(3, 8), torch.zeros(3, dtype=torch.int64))
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] >= 11


def test_what_a_step_says_of_itself() -> None:
    model = network()
    step = ol.train_step(model, None, torch.optim.SGD(model.parameters(), lr=0.1))
    assert repr(step).startswith("TrainStep(Sequential, None, SGD; not recorded: the model is on cpu")


@pytest.mark.parametrize(("compile", "autotuned"), [(True, False), ("max-autotune", True)])
def test_max_autotune_is_passed_on_without_graphs_of_its_own(
    monkeypatch: pytest.MonkeyPatch, compile: bool | str, autotuned: bool
) -> None:
    given: list[dict[str, Any]] = []

    def compile_fx(gm: torch.fx.GraphModule, inputs: list[Any], config_patches: dict[str, Any]) -> Any:
        given.append(config_patches)
        return gm.forward

    monkeypatch.setattr(backend, "no_code_generator_reason", lambda device: "")
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    model = network()
    step = ol.train_step(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), compile=compile)
    step(*batches(1)[0])
    (patches,) = given
    assert patches.get("max_autotune", False) is autotuned
    assert not patches.get("triton.cudagraphs", False)


@pytest.mark.parametrize("recorded", [False, True])
def test_recorded_steps_use_ops_of_ours_at_any_size(recorded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operation by operation, small ones would cost the host more than they save."""
    given: list[bool] = []

    def spied(*args: Any, in_graph: bool, **options: Any) -> Any:
        given.append(in_graph)
        return []

    monkeypatch.setattr(backend, "rewrite", spied)
    model, (data, *_) = network(), batches(1)
    step = PlainStep(
        model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), clip_norm=None, autocast=None, scaler=None,
        accumulate=1, compile=True, mode=None, recorded=recorded,
    )  # fmt: skip
    step(data, {}, update=True)
    assert given == [recorded]


def test_methods_of_the_model_and_the_optimizer_are_not_those_of_a_step() -> None:
    model = network()
    step = ol.train_step(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), compile=False)
    for name, owners in (("state_dict", "step.model and step.optimizer"), ("train", "step.model")):
        with pytest.raises(AttributeError, match=f"no attribute '{name}': use that of {owners}$"):
            getattr(step, name)
    with pytest.raises(AttributeError, match=r"no attribute 'stat'$"):
        _ = step.stat


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_begins_without_gradients_and_leaves_those_of_others(device: str, accumulate: int) -> None:
    """A GAN: the generator's step goes through the critic, whose gradients it neither changes nor uses."""

    def train(alternately: Callable[[nn.Module, nn.Module, nn.Module], Any]) -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(1)
        generator, critic = (nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(2))
        alternately(generator.to(device), critic.to(device), nn.Sequential(generator, critic))
        return generator, critic

    data = [
        torch.randn(6, 12, 8, device=device) for _ in range(8)
    ]  # of each round: two batches for each of three arguments

    def ours(generator: nn.Module, critic: nn.Module, both: nn.Module) -> None:
        critical, generating = (
            ol.train_step(model, nn.MSELoss(), torch.optim.SGD(owner.parameters(), lr=0.5), accumulate=accumulate)
            for model, owner in ((critic, critic), (both, generator))
        )
        for x, y, z, *others in data:
            critic.zero_grad(set_to_none=False)
            for _ in range(accumulate):
                generating(z, y)
            assert not any(one.grad.any() for one in critic.parameters() if one.grad is not None)
            critic(x).sum().backward()
            for batch in (x, others[0])[:accumulate]:
                critical(batch, y)

    def theirs(generator: nn.Module, critic: nn.Module, both: nn.Module) -> None:
        optimizers = [torch.optim.SGD(one.parameters(), lr=0.5) for one in (critic, generator)]
        for x, y, z, *others in data:
            for model, optimizer, inputs in ((both, optimizers[1], (z, z)), (critic, optimizers[0], (x, others[0]))):
                optimizer.zero_grad()
                for batch in inputs[:accumulate]:
                    (F.mse_loss(model(batch), y) / accumulate).backward()
                optimizer.step()

    for one, other in zip(train(ours), train(theirs), strict=True):
        assert_same_weights(one, other, WEIGHT_TOLERANCE * 10)


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("compile", [True, False])
def test_a_loss_function_with_a_model_of_its_own_leaves_its_gradients(device: str, compile: bool) -> None:
    generator, critic = (nn.Linear(8, 8).to(device) for _ in range(2))
    step = ol.train_step(
        generator, lambda made, y: F.mse_loss(critic(made), y), torch.optim.SGD(generator.parameters(), lr=0.1),
        compile=compile,
    )  # fmt: skip
    critic(torch.ones(1, 8, device=device)).sum().backward()
    before = [one.grad.clone() for one in critic.parameters() if one.grad is not None]
    for _ in range(5):
        step(torch.randn(12, 8, device=device), torch.randn(12, 8, device=device))
    after = [one.grad for one in critic.parameters()]
    assert len(before) == 2
    assert all(map(torch.equal, before, after))


def test_a_step_keeps_what_it_was_made_for() -> None:
    model = network()
    step = ol.train_step(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1))
    for name in ("model", "loss", "optimizer", "accumulate", "reason"):
        with pytest.raises(AttributeError):
            setattr(step, name, None)
