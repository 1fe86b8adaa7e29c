"""A fused model is the model: same class, state, modes, copies and hooks, and the same results."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import onelaunch as ol
from onelaunch.fuse import backend, decide
from onelaunch.fuse.fuse import FusedCall, is_fused
from tests.fuse.models import Mixer, Recommender, ResNet, UNet


@pytest.fixture(autouse=True)
def patched(no_code: None) -> None:
    """Without code generation."""


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Dropout(dropout), nn.Linear(8, 3))
        self.scale = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) * self.scale


X = torch.randn(4, 6)


def test_same_class_state_and_results() -> None:
    model = Net()
    fused = ol.fuse(model)
    assert type(fused) is Net
    assert is_fused(fused)
    assert not is_fused(model)
    assert ol.fuse(fused) is fused
    assert repr(fused) == repr(model)
    assert list(fused.state_dict()) == list(model.state_dict())
    assert all(a is b for a, b in zip(fused.parameters(), model.parameters(), strict=True))
    torch.testing.assert_close(fused(X), model(X))
    torch.testing.assert_close(fused(x=X), model(X))


@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (Mixer, (torch.randn(2, 3, 16, 16),)),
        (ResNet, (torch.randn(2, 3, 16, 16),)),
        (UNet, (torch.randn(2, 3, 16, 16),)),
        (Recommender, (torch.randn(5, 13), torch.randint(20, (5, 3)))),
    ],
)
def test_models_as_their_authors_write_them(
    make: Any, inputs: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every match replaced: results, gradients and buffers."""
    forced = decide.onelaunch
    monkeypatch.setattr(decide, "onelaunch", lambda gm, inputs, **options: forced(gm, inputs, forced=True, **options))
    model = make().double()
    inputs = tuple(x.double() if x.is_floating_point() else x for x in inputs)
    other = copy.deepcopy(model)
    got, expected = ol.fuse(model)(*inputs), other(*inputs)
    torch.testing.assert_close(got, expected)
    got.square().sum().backward()
    expected.square().sum().backward()
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, msg=name)
    for (name, one), two in zip(model.named_buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(one, two, msg=name)


def test_an_optimizer_over_either_trains_both() -> None:
    model = Net()
    fused = ol.fuse(model)
    optimizer = torch.optim.SGD(fused.parameters(), lr=0.1)
    before = fused(X)
    fused(X).square().sum().backward()
    optimizer.step()
    assert not torch.allclose(before, fused(X))
    torch.testing.assert_close(fused(X), model(X))


def test_modes() -> None:
    fused = ol.fuse(Net(0.5))
    assert not torch.equal(fused(X), fused(X))
    fused.eval()
    assert torch.equal(fused(X), fused(X))
    fused.train()
    assert not torch.equal(fused(X), fused(X))


def test_stored_methods_are_of_the_fused_model() -> None:
    class Stored(Net):
        def __init__(self) -> None:
            super().__init__()
            self.forward = self.run
            self.other = Net().forward

        def run(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(self.body(x), 0.5, self.training)

    model = Stored()
    fused = ol.fuse(model)
    fused.eval()
    assert torch.equal(fused(X), fused(X))
    assert not torch.equal(model(X), model(X))
    assert fused.other is model.other


def test_copies_are_fused_and_their_own() -> None:
    fused = ol.fuse(Net())
    fused(X)
    for made in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        assert is_fused(made)
        torch.testing.assert_close(made(X), fused(X))
        with torch.no_grad():
            made.body[3].bias.add_(1)
        torch.testing.assert_close(made(X), fused(X) + 2)


def test_a_shallow_copy_and_a_replica_run_themselves() -> None:
    fused = ol.fuse(Net())
    expected = fused(X)
    for made in (copy.copy(fused), fused._replicate_for_data_parallel()):
        made._modules = dict(fused._modules)
        made.scale = 4.0
        torch.testing.assert_close(made(X), 2 * expected)
        assert vars(made)["_call_impl"].module is made
    torch.testing.assert_close(fused(X), expected)


def test_a_model_whose_state_leaves_attributes_out() -> None:
    class Slim(Net):
        def __getstate__(self) -> dict[str, Any]:
            return {name: value for name, value in vars(self).items() if name != "scale"}

    model = Slim()
    torch.testing.assert_close(ol.fuse(model)(X), model(X))


def test_values_in_slots() -> None:
    class Base(Net):
        __slots__ = ("__private", "factor")

        def __init__(self) -> None:
            super().__init__()
            self.__private = 3.0
            self.factor = 4.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x) * self.__private * self.factor

    class Slotted(Base):
        __slots__ = ("unset",)

    model = Slotted()
    fused = ol.fuse(model)
    torch.testing.assert_close(fused(X), model(X))
    assert not hasattr(fused, "unset")


def test_many_fused_models_are_all_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo stops after 8 compilations of one code object."""
    compiled = []
    real = decide.onelaunch

    def counted(*args: Any, **options: Any) -> Any:
        compiled.append(1)
        return real(*args, **options)

    monkeypatch.setattr(decide, "onelaunch", counted)
    for width in range(1, 13):
        ol.fuse(nn.Linear(6, width))(X)
    assert len(compiled) == 12


def test_inside_an_outer_compiler_and_export() -> None:
    model = Net()
    fused = ol.fuse(model)
    outer = torch.compile(lambda x: fused(x) + 1, backend="eager", fullgraph=True)
    torch.testing.assert_close(outer(X), model(X) + 1)
    exported = torch.export.export(fused, (X,))
    torch.testing.assert_close(exported.module()(X), model(X))
    whole = ol.fuse(nn.Sequential(fused, nn.Linear(3, 2)))  # a fused part of a fused model
    torch.testing.assert_close(whole(X), whole[1](model(X)))


def test_autocast_and_checkpoints() -> None:
    model = Net()
    fused = ol.fuse(model)
    with torch.autocast("cpu", torch.bfloat16):
        assert fused(X).dtype == torch.bfloat16
    x = X.clone().requires_grad_()
    got = torch.autograd.grad(checkpoint(fused, x, use_reentrant=False).sum(), x)
    torch.testing.assert_close(got, torch.autograd.grad(model(x).sum(), x))


@pytest.fixture
def one_process() -> Iterator[None]:
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_distributed_data_parallel(one_process: None) -> None:
    model = Net()
    other = copy.deepcopy(model)
    parallel = nn.parallel.DistributedDataParallel(ol.fuse(model))
    parallel(X).square().sum().backward()
    other(X).square().sum().backward()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad)


def test_example_inputs_on_a_cpu_measure_nothing() -> None:
    x = X.clone().requires_grad_()
    fused = ol.fuse(Net(), x)
    assert vars(fused)["_call_impl"].choice == decide.Choice()
    assert x.grad is None


def test_buffers_that_forward_replaces_stay() -> None:
    class Tracked(nn.Module):
        mean: torch.Tensor
        last: torch.Tensor | None

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(6))
            self.register_buffer("last", None)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
            self.last = x
            return x - self.mean

    model = Tracked()
    before = model.mean
    ol.explain(model, X)
    fused = ol.fuse(model, X)
    assert model.mean is fused.mean is before
    assert model.last is None
    assert not before.any()
    fused(X)
    torch.testing.assert_close(model.mean, 0.1 * X.mean(0))


@pytest.mark.parametrize("closure", [False, True])
def test_attributes_that_forward_sets_stay(closure: bool) -> None:
    class Part(nn.Module):
        state: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.state = x if self.state is None else self.state.detach() * 0.5 + x
            return self.state

    class Stateful(Part):
        def __init__(self) -> None:
            super().__init__()
            self.part, self.calls, self.kept = Part(), 0, X
            if closure:
                self.forward = lambda x: type(self).forward(self, x)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.calls:
                self.made = nn.Linear(6, 2)
                del self.kept
            self.calls += 1
            return super().forward(self.made(self.part(x)))

    model = Stateful()
    before = {*vars(model)}
    ol.explain(model, X)
    fused = ol.fuse(model, X)
    for one in (model, fused):
        assert one.state is one.part.state is None
        assert (one.calls, one.kept, [*one.children()]) == (0, X, [model.part])
    assert vars(model).keys() == before
    assert fused(X).shape == (4, 2)
    assert (model if closure else fused).calls == 1


def test_uncompiled_when_that_is_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    fused = ol.fuse(model)
    fused.__dict__["_call_impl"] = FusedCall(fused, decide.Choice(None))
    monkeypatch.setattr(decide, "onelaunch", None)
    torch.testing.assert_close(fused(X), model(X))


def test_errors_in_one_line() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            pass

    class Called(nn.Module):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    with pytest.raises(TypeError, match=r"^model is a function: pass a torch\.nn\.Module$"):
        ol.fuse(test_modes)  # type: ignore[type-var]
    for container in (nn.ModuleList([nn.Linear(4, 4)]), nn.ModuleDict()):
        with pytest.raises(TypeError, match=r"^model is a Module\w+, which has no forward: pass a module that has"):
            ol.fuse(container, X)
    for refused in (lambda model: ol.fuse(model), lambda model: ol.fuse(model, X), lambda model: ol.explain(model, X)):
        with pytest.raises(
            TypeError, match=r"^model is a Called, which has no forward: rename its __call__ to forward$"
        ):
            refused(Called())
    with pytest.raises(TypeError, match=r"^model is a Bare without modules: call super\(\)"):
        ol.fuse(Bare())
    with pytest.raises(
        ValueError, match=r"^model is a Sequential with parameters that are not initialised: call it on"
    ):
        ol.fuse(nn.Sequential(nn.LazyLinear(3)))
    with pytest.raises(TypeError, match=r"^fuse has no argument 'mode', nor has the model: Linear\.forward has input$"):
        ol.fuse(nn.Linear(4, 4), torch.randn(3, 4), mode="max-autotune")
    with pytest.raises(ValueError, match=r"^fuse\(float32\[3, 5\]\) is not possible: mat1 and mat2 shapes [^\n]*$"):
        ol.fuse(nn.Linear(4, 4), torch.randn(3, 5))


def test_a_shape_instead_of_a_tensor() -> None:
    for function in (ol.fuse, ol.explain):
        with pytest.raises(
            ol.OnelaunchError, match=r"^\w+\(\(3, 4\)\) is not [^\n]*, and pass tensors instead of shapes$"
        ):
            function(nn.Linear(4, 4), (3, 4))
    with pytest.raises(ol.OnelaunchError, match=r"check these shapes, types and values$"):
        ol.fuse(nn.Upsample((4, 4)), torch.randn(2, 3), (4, 4))


def test_compiling_for_a_cpu_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(backend, "no_code_generator_reason", lambda device: "")
    monkeypatch.setattr(backend, "_inductor", lambda gm, *others: gm.forward)
    fused = ol.fuse(nn.Linear(4, 4))
    for _ in range(2):
        fused(torch.randn(3, 4))
    (message,) = [record.getMessage() for record in caplog.records if record.name == "onelaunch"]
    assert message.startswith("fuse: compiling Linear for the CPU takes 10 s or more")


def test_with_inductor(inductor: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from onelaunch.fuse import backend

    monkeypatch.setattr(backend, "no_code_generator_reason", lambda device: "")
    model = Net()
    fused = ol.fuse(model)
    torch.testing.assert_close(fused(X), model(X))
    fused(X).sum().backward()
    assert model.body[0].weight.grad is not None
