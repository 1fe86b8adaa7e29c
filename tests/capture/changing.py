"""What a loss or a forward may read from outside, and how it changes on the way: a table of (read, change) for tests.

Each entry makes a fresh pair. `read()` gives the factor by which an output or a loss is multiplied; `change(model)` changes it,
or the model, once. Both are as a user's program would do it.
"""

from __future__ import annotations

import itertools
import random
import types
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Pair = tuple[Callable[[], Any], Callable[[Any], Any]]
beta = 1.0


class Settings:
    def __init__(self) -> None:
        self.own = 1.0
        self.array = np.ones(3, dtype=np.float32)

    @property
    def half(self) -> float:
        return self.own / 2


class Slots:
    __slots__ = ("own",)

    def __init__(self) -> None:
        self.own = 1.0


def one() -> float:
    return 1.0


def global_variable() -> Pair:
    globals()["beta"] = 1.0
    return (lambda: beta), (lambda model: globals().update(beta=0.25))


def closure() -> Pair:
    value = 1.0

    def change(model: Any) -> None:
        nonlocal value
        value = 0.25

    return (lambda: value), change


def dict_entry() -> Pair:
    state = {"beta": 1.0}
    return (lambda: state["beta"]), (lambda model: state.update(beta=0.25))


def list_entry() -> Pair:
    state = [1.0, 2.0]
    return (lambda: state[0]), (lambda model: state.__setitem__(0, 0.25))


def nested() -> Pair:
    state = [{"settings": Settings()}]
    return (lambda: state[0]["settings"].own), (lambda model: setattr(state[0]["settings"], "own", 0.25))


def attribute() -> Pair:
    settings = Settings()
    return (lambda: settings.own), (lambda model: setattr(settings, "own", 0.25))


def attribute_by_name() -> Pair:
    settings = Settings()
    return (lambda: getattr(settings, "own")), (lambda model: setattr(settings, "own", 0.25))  # noqa: B009


def property_of_an_object() -> Pair:
    settings = Settings()
    return (lambda: settings.half), (lambda model: setattr(settings, "own", 0.25))


def attribute_of_a_class() -> Pair:
    class Own:
        shared = 1.0

    settings = Own()
    return (lambda: settings.shared), (lambda model: setattr(Own, "shared", 0.25))


def slot() -> Pair:
    slots = Slots()
    return (lambda: slots.own), (lambda model: setattr(slots, "own", 0.25))


def another_object() -> Pair:
    holder = types.SimpleNamespace(settings=Settings())

    def change(model: Any) -> None:
        holder.settings = Settings()
        holder.settings.own = 0.25

    return (lambda: holder.settings.own), change


def numpy_number() -> Pair:
    settings = types.SimpleNamespace(own=np.float32(1.0))
    return (lambda: float(settings.own)), (lambda model: setattr(settings, "own", np.float32(0.25)))


def numpy_in_place() -> Pair:
    settings = Settings()
    return (lambda: torch.from_numpy(settings.array).sum().to("cpu")), (lambda model: settings.array.fill(0.1))


def context_variable() -> Pair:
    variable: ContextVar[float] = ContextVar("variable", default=1.0)
    return variable.get, (lambda model: variable.set(0.25))


def count() -> Pair:
    numbers = itertools.count()
    return (lambda: 1.0 + next(numbers) / 10), (lambda model: None)


def generator_of_python() -> Pair:
    generator = random.Random(0)
    return generator.random, (lambda model: None)


def generator_of_numpy() -> Pair:
    generator = np.random.default_rng(0)
    return generator.random, (lambda model: None)


def generator_of_pytorch() -> Pair:
    generator = torch.Generator().manual_seed(0)
    return (lambda: torch.rand((), generator=generator).item()), (lambda model: None)


def tensor_replaced() -> Pair:
    holder = {"tensor": torch.ones(())}
    return (lambda: holder["tensor"]), (lambda model: holder.update(tensor=torch.full((), 0.25)))


def tensor_filled() -> Pair:
    tensor = torch.ones(())
    return (lambda: tensor), (lambda model: tensor.fill_(0.25))


def length_of_a_tensor() -> Pair:
    holder = types.SimpleNamespace(rows=torch.ones(3))
    return (lambda: 3.0 / len(holder.rows)), (lambda model: setattr(holder, "rows", torch.ones(12)))


def presence_of_a_tensor() -> Pair:
    holder = types.SimpleNamespace(mask=torch.ones(()))
    return (lambda: 1.0 if holder.mask is not None else 0.25), (lambda model: setattr(holder, "mask", None))


def type_of_a_tensor() -> Pair:
    holder = types.SimpleNamespace(mask=torch.ones(3))

    def change(model: Any) -> None:
        holder.mask.data = holder.mask.data.double()

    return (lambda: 1.0 if holder.mask.dtype is torch.float32 else 0.25), change


def transposed_in_place() -> Pair:
    matrix = torch.tensor([[1.0, 1.0], [0.25, 1.0]])
    return (lambda: matrix[0, 1]), (lambda model: matrix.t_())


def resized_in_place() -> Pair:
    values = torch.ones(8)
    return (lambda: values.sum() / 8), (lambda model: setattr(values, "data", values.data[:2]))


def entry_by_an_object() -> Pair:
    key = Settings()
    table = {key: 1.0}
    return (lambda: table[key]), (lambda model: table.update({key: 0.25}))


def setting_of_a_library() -> Pair:
    torch.backends.cudnn.benchmark_limit = 10
    return (
        (lambda: 1.0 if torch.backends.cudnn.benchmark_limit == 10 else 0.25),
        (lambda model: setattr(torch.backends.cudnn, "benchmark_limit", 9)),
    )


def another_function() -> Pair:
    holder = types.SimpleNamespace(function=lambda: 1.0)
    return (lambda: holder.function()), (lambda model: setattr(holder, "function", lambda: 0.25))


def of_the_model(change: Callable[[Any], Any]) -> Callable[[], Pair]:
    return lambda: (one, change)


READS: dict[str, Callable[[], Pair]] = {
    "a global variable": global_variable, "a closure": closure, "an entry of a dict": dict_entry,
    "an entry of a list": list_entry, "an object in a dict in a list": nested, "an attribute": attribute,
    "an attribute by getattr": attribute_by_name, "a property": property_of_an_object,
    "an attribute of a class": attribute_of_a_class, "a slot": slot, "another object": another_object,
    "a number of NumPy": numpy_number, "an array in place": numpy_in_place, "a context variable": context_variable,
    "itertools.count": count, "random.Random": generator_of_python, "np.random.Generator": generator_of_numpy,
    "torch.Generator": generator_of_pytorch, "another tensor": tensor_replaced, "a tensor in place": tensor_filled,
    "another function": another_function, "the length of a tensor": length_of_a_tensor,
    "whether there is a tensor": presence_of_a_tensor, "the type of a tensor": type_of_a_tensor,
    "a tensor transposed in place": transposed_in_place, "a tensor made shorter": resized_in_place,
    "an entry by an object": entry_by_an_object, "a setting of PyTorch": setting_of_a_library,
}  # fmt: skip


class Average(nn.Module):
    """Forward replaces a tensor, from which the next call goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.average = torch.ones(())

    def forward(self, x: Tensor) -> Tensor:
        self.average = self.average.to(x.device) * 0.9
        return x * self.average


class Configured(nn.Module):
    """It reads an object that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.configuration, self.factor = Settings(), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.configuration.own * self.factor


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.0), nn.BatchNorm1d(16), Configured(), nn.Linear(16, 4)
    return nn.Sequential(*layers)


def replace_weight(model: Any) -> None:
    """With the same values at another address."""
    model[0].weight.data = model[0].weight.data.clone()


CHANGES: dict[str, Callable[[Any], Any]] = {
    "Dropout.p": lambda model: setattr(model[2], "p", 1.0),
    "freeze": lambda model: model[0].requires_grad_(False),
    "evaluate a layer": lambda model: model[3].eval(),
    "an attribute of a layer": lambda model: setattr(model[4], "factor", 0.25),
    "an attribute of a layer's object": lambda model: setattr(model[4].configuration, "own", 0.25),
    "a hook": lambda model: model[1].register_forward_hook(lambda layer, x, y: y * 0.25),
    "a hook of the whole model": lambda model: model.register_forward_hook(lambda layer, x, y: y * 0.25),
    "a hook before": lambda model: model[1].register_forward_pre_hook(lambda layer, x: (x[0] * 0.25,)),
    "a hook of gradients": lambda model: model[0].weight.register_hook(lambda gradient: gradient * 0.25),
    "a hook of a layer's gradients": lambda model: model[1].register_full_backward_hook(
        lambda layer, inputs, outputs: (inputs[0] * 0.25,)
    ),
    "a layer": lambda model: model.__setitem__(1, nn.ReLU()),
    "a buffer": lambda model: setattr(model[3], "running_mean", model[3].running_mean + 0.5),
    "memory of a weight": replace_weight,
    "weights": lambda model: model[0].weight.data.mul_(0.5),
    "forward of a layer": lambda model: setattr(model[1], "forward", torch.relu),
}
