"""`ol.train_step` against a plain loop: on a CPU operation by operation, on a GPU as recorded graphs."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo import lookup_backend

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


class OwnLoss(nn.Module):
    """Returns a dict with its loss, as `transformers` do; inputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layer(inputs)
        return {"logits": logits, "loss": F.cross_entropy(logits, labels)}


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_models_with_their_own_loss_and_inputs_by_name(device: str) -> None:
    model, data = OwnLoss().to(device), batches(6, device)
    other = copy.deepcopy(model)
    step = ol.train_step(model, None, torch.optim.SGD(model.parameters(), lr=0.1))
    calls = [lambda x, y: step({"inputs": x, "labels": y}), lambda x, y: step(inputs=x, labels=y), step]
    losses = [float(calls[number % 3](x, y)) for number, (x, y) in enumerate(data)]
    expected = plain_losses(nn.Sequential(other.layer), torch.optim.SGD(other.parameters(), lr=0.1), data)
    assert_same_course(losses, expected, LOSS_TOLERANCE * 10)


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


def test_compiling_for_a_cpu_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    model, data = network(), batches(2)
    monkeypatch.setattr(backend, "no_code_generator_reason", lambda device: "")
    monkeypatch.setattr(backend, "_inductor", lambda gm, *others: gm.forward)
    for options in ({}, {"compile": False}):
        step = ol.train_step(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1), **options)
        for x, y in data:
            step(x, y)
    messages = [record.getMessage() for record in caplog.records if record.name == "onelaunch"]
    assert len(messages) == 1
    assert messages[0].startswith(
        "train_step: compiling the step for the CPU takes 10 s or more, minutes for a large model"
    )
    assert messages[0].endswith("compile=False starts at once")


def test_where_the_compiler_fails_steps_run_uncompiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As with a file in Inductor's cache that was cut short when a process was killed."""

    def fails(*_: Any) -> Any:
        raise ImportError("main.so: file too short")

    monkeypatch.setattr(backend, "no_code_generator_reason", lambda device: "")
    monkeypatch.setattr(backend, "_inductor", fails)
    model, data = network(), batches(3)
    other = copy.deepcopy(model)
    step = ol.train_step(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = [float(step(x, y)) for x, y in data]
    assert_same_course(losses, plain_losses(other, torch.optim.SGD(other.parameters(), lr=0.1), data), LOSS_TOLERANCE)
    messages = [record.getMessage() for record in caplog.records if "compiler failed" in record.getMessage()]
    assert len(messages) == 1
    assert "file too short" in messages[0]


def test_what_a_step_changed_before_the_compiler_failed_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in the loss, its inputs, and generators other than PyTorch's."""

    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(()))
            self.generator = torch.Generator().manual_seed(1)
            self.calls = 0

        def forward(self, y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            self.mean.mul_(0.9).add_(y.detach().mean())
            self.calls += 1
            target.div_(2)
            drawn = random.random() + np.random.rand() + torch.rand((), generator=self.generator)  # noqa: NPY002
            return (y[:, 0] - target).square().mean() * drawn + self.mean

    def course(compile: bool) -> tuple[Any, ...]:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002
        model, loss, target = network(), Loss(), torch.ones(12)
        step = ol.train_step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), compile=compile)
        if compile:
            plain, forward = step._plain, step._plain._forward_and_loss

            def fails_late(*given: Any) -> Any:
                forward(*given)
                raise torch._dynamo.exc.InternalTorchDynamoError("late")

            monkeypatch.setattr(plain, "_forward", fails_late)
        losses = [float(step(torch.ones(12, 8), target)) for _ in range(3)]
        return losses, float(loss.mean), loss.calls, target.tolist()

    assert course(True) == course(False)


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of Dynamo's look at values between two graphs
def test_a_loss_of_gradients_is_not_compiled(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """As of physics-informed networks, and gradient penalties: compiled code is not differentiated twice.

    What the step did before that was noticed is undone: statistics, random numbers, and the window's earlier gradients stay.
    """

    class Physics(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(1, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))

        def forward(self, x: torch.Tensor, penalised: bool) -> torch.Tensor:
            x = x.detach().requires_grad_()
            u = self.body(x)
            if not penalised:
                return (u**2).mean()
            (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
            return ((slope - u) ** 2).mean()

    monkeypatch.setattr(backend, "no_code_generator_reason", lambda device: "")
    monkeypatch.setattr(backend, "_inductor", lambda gm, inputs, *_: lookup_backend("aot_eager")(gm, inputs))
    model, x = Physics(), torch.rand(16, 1)
    other = copy.deepcopy(model)
    step = ol.train_step(model, None, torch.optim.SGD(model.parameters(), lr=0.01), accumulate=2)
    torch.manual_seed(3)
    losses = [float(step(x, penalised)) for penalised in (False, True, False, True)]
    optimizer, expected = torch.optim.SGD(other.parameters(), lr=0.01), []
    torch.manual_seed(3)
    for penalised in (False, True, False, True):
        loss = other(x, penalised)
        (loss / 2).backward()
        if penalised:
            optimizer.step()
            optimizer.zero_grad()
        expected.append(loss.item())
    assert_same_course(losses, expected, LOSS_TOLERANCE)
    assert_same_weights(model, other, WEIGHT_TOLERANCE)
    for one, two in zip(model.buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(one, two)
    assert sum("the loss depends on gradients" in record.getMessage() for record in caplog.records) == 1


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("derivatives", [1, 2])
def test_a_loss_function_that_differentiates_by_the_inputs_is_not_compiled(
    monkeypatch: pytest.MonkeyPatch, derivatives: int, training: bool
) -> None:
    """The input is also the target, as in step(x, x)."""

    def loss(u: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        slope = u
        for _ in range(derivatives):
            (slope,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
        return ((slope - u) ** 2).mean()

    monkeypatch.setattr(backend, "no_code_generator_reason", lambda device: "")
    monkeypatch.setattr(backend, "_inductor", lambda gm, inputs, *_: lookup_backend("aot_eager")(gm, inputs))
    model, x = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).train(training), torch.rand(16, 1)
    other, data = copy.deepcopy(model), [(x.requires_grad_(), x)] * 3
    step = ol.train_step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = [float(step(*batch)) for batch in data]
    expected = []
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    for one, two in data:
        value = loss(other(one), two)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        expected.append(value.item())
    assert_same_course(losses, expected, LOSS_TOLERANCE)
    assert repr(step).endswith("; not compiled: the loss depends on gradients, which it does not differentiate)")


@pytest.mark.parametrize("call", [1, 2])
def test_errors_of_the_model_itself_pass_whatever_an_uncompiled_trial_would_do(
    monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    class Stop(Exception):
        pass

    class Stops(nn.Linear):
        calls: ClassVar[list[int]] = [0]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls[0] += 1
            if self.calls[0] == call:
                raise Stop
            return super().forward(x)

    monkeypatch.setattr(backend, "no_code_generator_reason", lambda device: "")
    monkeypatch.setattr(backend, "_inductor", lambda gm, inputs, *_: lookup_backend("aot_eager")(gm, inputs))
    Stops.calls[0] = 0
    model, (x, y) = Stops(8, 4), batches(1)[0]
    step = ol.train_step(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(call - 1):
        step(x, y)
    with pytest.raises(Stop):
        step(x, y)
    assert "not compiled" not in repr(step)


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_step_that_is_undone_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.calls = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)), 0
            self.count: torch.Tensor
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.count = self.count + 1
            return self.body(x)

    def loss(u: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(u.sum(), x, create_graph=True)[0].square().mean()

    monkeypatch.setattr(backend, "no_code_generator_reason", lambda device: "")
    monkeypatch.setattr(backend, "_inductor", lambda gm, inputs, *_: lookup_backend("aot_eager")(gm, inputs))
    model, x = Counts(), torch.rand(16, 1, requires_grad=True)
    step = ol.train_step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1))
    step(x, x)
    step(x, x)
    assert "not compiled" in repr(step)
    assert (model.calls, float(model.count)) == (2, 2.0)


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


class Configured(nn.Module):
    """Like classifiers of `transformers`: the first call sets an attribute, for which Dynamo compiles again."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.kind = network(), kind

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if not self.kind:
            self.kind = "classes"
        return self.inner(x) * weight


@pytest.mark.parametrize("by_name", [True, False])
@pytest.mark.parametrize("kind", ["", "classes"])
def test_a_partial_batch_on_a_cpu_compiles_nothing(kind: str, by_name: bool) -> None:
    model = Configured(kind)
    step = ol.train_step(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1))
    stats = torch._dynamo.utils.counters["stats"]
    before = stats["unique_graphs"]
    for rows in (12, 12, 5, 7):
        (x, y), weight = batches(1, rows=rows)[0], torch.ones(rows, 1)
        step(x, y, weight=weight) if by_name else step(x, weight, y)
    assert stats["unique_graphs"] == before + (1 if kind else 2)


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


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda step: pickle.loads(pickle.dumps(step))])
def test_a_copy_trains_its_own_model(copied: Callable[[Any], Any], compile: bool, device: str) -> None:
    model, data = network(device), batches(8, device)
    step = ol.train_step(model, F.cross_entropy, torch.optim.Adam(model.parameters(), 1e-2), compile=compile)
    for batch in data[:4]:
        step(*batch)
    before, other = copy.deepcopy(model), copied(step)
    losses = [float(other(*batch)) for batch in data[4:]]
    assert_same_weights(model, before, 0.0)
    assert losses == pytest.approx([float(step(*batch)) for batch in data[4:]], rel=LOSS_TOLERANCE)
    assert_same_weights(other.model, model, WEIGHT_TOLERANCE)


class OwnTrainer(nn.Module):
    """A model that has its own step, whose loss function is a method."""

    def __init__(self, owns_loss: bool) -> None:
        super().__init__()
        self.layers = network()
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        self.step = ol.train_step(self, self.loss if owns_loss else F.cross_entropy, self.optimizer, compile=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, target)


@pytest.mark.parametrize("owns_loss", [False, True])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_model_that_has_its_step_trains_itself(copied: Callable[[Any], Any], owns_loss: bool) -> None:
    model, (first, second) = OwnTrainer(owns_loss), batches(2)
    model.step(*first)
    before, others = copy.deepcopy(model), [copied(model), copied(model.step).model]
    assert all(other.step.model is other for other in others)
    losses = {float(other.step(*second)) for other in others}
    assert_same_weights(model, before, 0.0)
    assert losses == {float(model.step(*second))}
    for other in others:
        assert_same_weights(other, model, 0.0)
    assert repr(others[0].step) == repr(model.step)


def test_a_copy_is_made_whatever_has_become_of_the_model() -> None:
    model, (x, y) = network(), batches(1)[0]
    step = ol.train_step(model, F.cross_entropy, torch.optim.SGD(model[-1].parameters(), lr=0.1), compile=False)
    model[-1] = copy.deepcopy(model[-1])  # the optimizer has the parameters of the layer that was there
    assert float(copy.deepcopy(step)(x, y)) == float(step(x, y))


def test_a_step_keeps_what_it_was_made_for() -> None:
    model = network()
    step = ol.train_step(model, F.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1))
    for name in ("model", "loss", "optimizer", "accumulate", "reason"):
        with pytest.raises(AttributeError):
            setattr(step, name, None)
