"""The same network however it is written; whatever else a forward does is refused."""

from __future__ import annotations

import copy
import logging
import random
import threading
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onelaunch as ol
from onelaunch.activations import ACTIVATIONS
from onelaunch.run.network import Activation, Add, Dropout, LayerNorm, Linear, Network, NotAnMlpError
from onelaunch.run.parse import parse_network

WIDTHS = (6, 8, 8, 3)


class Written(nn.Module):
    """An MLP 6-8-8-3 with dropout after each hidden layer, whose forward is a function of (self, x)."""

    def __init__(self, run: Callable[[Written, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second, self.last = (nn.Linear(*pair) for pair in pairwise(WIDTHS))
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


class Block(nn.Module):
    def __init__(self, linear: nn.Linear, p: float) -> None:
        super().__init__()
        self.inner = nn.Sequential(linear, nn.ReLU(inplace=True))
        self.dropout = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.inner(x))


def functions(model: Written, x: Tensor) -> Tensor:
    x = F.dropout(F.relu(model.first(x.view(len(x), -1))), 0.25, model.training)
    x = F.dropout(torch.relu(model.second(x)), p=0.25, training=model.training)
    return model.last(x)


def methods(model: Written, x: Tensor) -> Tensor:
    x = F.dropout(model.first(x.reshape(x.shape[0], 6)).relu(), 0.25, training=model.training)
    x = F.dropout(F.linear(x, model.second.weight, model.second.bias).relu_(), 0.25, model.training)
    return model.last(x.float())


def conditional(model: Written, x: Tensor) -> Tensor:
    for layer in (model.first, model.second):
        x = F.relu(layer(torch.flatten(x, 1)), inplace=True)
        if model.training:
            x = torch.dropout(x, 0.25, True)
    return model.last(x)


def sequential() -> nn.Sequential:
    torch.manual_seed(3)
    linears = [nn.Linear(*pair) for pair in pairwise(WIDTHS)]
    return nn.Sequential(
        linears[0], nn.ReLU(), nn.Dropout(0.25), linears[1], nn.ReLU(), nn.Dropout(0.25), linears[2]
    )  # fmt: skip


def nested() -> nn.Module:
    plain = sequential()
    return nn.Sequential(nn.Flatten(), nn.Sequential(Block(plain[0], 0.25), Block(plain[3], 0.25)), plain[6])


def fused_layers() -> nn.Module:
    plain = sequential()
    layers: list[nn.Module] = [ol.nn.Linear(6, 8, activation="relu", dropout=0.25), ol.nn.Linear(8, 8)]
    layers += [ol.nn.ReLUDropout(0.25), ol.nn.Linear(8, 3)]
    model = nn.Sequential(*layers)
    model.load_state_dict(dict(zip(model.state_dict(), plain.state_dict().values(), strict=True)))
    return model


FORMS: dict[str, Callable[[], nn.Module]] = {
    "functions": lambda: Written(functions), "methods": lambda: Written(methods),
    "conditional": lambda: Written(conditional), "nested": nested, "ol.nn": fused_layers,
    "fused": lambda: ol.fuse(sequential()), "fused class": lambda: ol.fuse(Written(functions)),
    "a fused part": lambda: nn.Sequential(ol.fuse(sequential()[:3]), *list(sequential())[3:]),
}  # fmt: skip


def kinds(network: Network) -> list[object]:
    """The layers without names; a Flatten of vectors does nothing."""
    found = [layer for layer in network.layers if type(layer).__name__ != "Flatten"]
    return [(type(layer).__name__, *(v for k, v in vars(layer).items() if k != "path")) for layer in found]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_same_network_and_trains_to_the_same_bits(form):
    twin, model = sequential(), FORMS[form]()
    network = parse_network(model)
    assert kinds(network) == kinds(parse_network(twin))
    names = model.state_dict().keys()
    assert {f"{linear.path}.weight" for linear in network.linears} <= names
    torch.manual_seed(0)
    x, y = torch.randn(50, 6), torch.randint(3, (50,))
    histories = [
        ol.fit(m, x, y, epochs=2, batch_size=16, lr=0.05, validation=(x, y), progress=False) for m in (twin, model)
    ]
    assert [history.engine for history in histories] == ["cpu", "cpu"]
    assert histories[0].losses == histories[1].losses
    assert histories[0].epochs[-1]["validation"] == histories[1].epochs[-1]["validation"]
    for ours, theirs in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_fused_layer_norm_is_a_layer_norm_unless_it_drops():
    def model(norm):
        return nn.Sequential(nn.Linear(6, 8), norm, nn.ReLU(), nn.Linear(8, 3))

    assert parse_network(model(ol.nn.LayerNorm(8, 1e-4))) == parse_network(model(nn.LayerNorm(8, 1e-4)))
    with pytest.raises(NotAnMlpError, match="layer '1' drops elements of its input"):
        parse_network(model(ol.nn.LayerNorm(8, dropout=0.1)))


@pytest.mark.parametrize("form", ["functions", "conditional", "ol.nn", "nested"])
def test_the_eager_engine_draws_the_same_masks(form):
    torch.manual_seed(0)
    x, y = torch.randn(50, 6), torch.randint(3, (50,))
    losses = []
    for engine in ("cpu", "eager"):
        model = FORMS[form]()
        losses.append(ol.fit(model, x, y, epochs=3, batch_size=16, engine=engine, lr=0.1, progress=False).losses)
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-5, atol=0)


def test_a_bare_linear_is_a_network():
    model = nn.Linear(4, 3)
    assert parse_network(model).linears[0].path == ""
    x, y = torch.randn(30, 4), torch.randint(3, (30,))
    runs = [(copy.deepcopy(model), engine) for engine in ("cpu", "eager")]
    losses = [ol.fit(m, x, y, epochs=2, engine=engine, progress=False).losses for m, engine in runs]
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-5, atol=0)
    assert not torch.equal(runs[0][0].weight, model.weight)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Linear(4, 8), nn.LayerNorm(8, eps=1e-4)
        self.inner, self.head = nn.Linear(8, 8), nn.Linear(8, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(x + F.gelu(self.inner(self.norm(x))))


def test_layer_norm_and_residual_additions_are_described():
    layers = parse_network(Residual()).layers
    assert layers[1] == LayerNorm("norm", 8, 1e-4, True, True)
    assert layers[3:5] == (Activation("gelu"), Add(0))


def adds_in_place(model: Written, x: Tensor) -> Tensor:
    x = model.first(x)
    y = torch.relu(model.second(x))
    y += x
    return model.last(y)


def test_an_addition_in_place_and_dropout_before_it():
    assert Add(0) in parse_network(Written(adds_in_place)).layers

    def dropped(model: Written, x: Tensor) -> Tensor:
        x = F.dropout(model.first(x), 0.5, model.training)
        return model.last(x + model.second(F.dropout(x, 0.5, model.training)))

    layers = parse_network(Written(dropped)).layers
    assert layers[1:5:2] == (Dropout(0.5, 0), layers[3])
    assert layers[4] == Add(1)


class Twice(nn.Module):
    """Computes what its description says, for the comparison by numbers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.network, self.state = parse_network(model), model.state_dict()

    def forward(self, x: Tensor) -> Tensor:
        values = {-1: x}
        for index, layer in enumerate(self.network.layers):
            values[index] = x = self.apply_layer(layer, x, values)
        return x

    def apply_layer(self, layer: object, x: Tensor, values: dict[int, Tensor]) -> Tensor:
        match layer:
            case Add():
                return x + values[layer.source]
            case Activation():
                return F.leaky_relu(x, layer.slope) if layer.name == "leaky_relu" else ACTIVATIONS[layer.name].value(x)
            case LayerNorm():
                weight, bias = self._tensors(layer.path)
                return F.layer_norm(x, (layer.features,), weight, bias, layer.eps)
            case Dropout():
                return x
            case Linear():
                return F.linear(x, *self._tensors(layer.path))
        return x.flatten(1)

    def _tensors(self, path: str) -> list[Tensor]:
        return [self.state[name] for name in (f"{path}.weight", f"{path}.bias") if name in self.state]


@pytest.mark.parametrize("make", [Residual, *(FORMS[name] for name in ("functions", "methods", "nested"))])
def test_the_description_computes_what_the_module_computes(make):
    model = make().eval()
    x = torch.randn(5, 4 if make is Residual else 6)
    assert torch.equal(Twice(model)(x), model(x))


def branches_on_values(model: Written, x: Tensor) -> Tensor:
    x = model.first(x)
    if x.sum() > 0:
        x = x.relu()
    return model.last(model.second(x))


def branches_on_rows(model: Written, x: Tensor) -> Tensor:
    x = model.second(model.first(x))
    return model.last(x.relu() if len(x) > 2 else x)


def branches_on_weights(model: Written, x: Tensor) -> Tensor:
    x = model.second(model.first(x))
    return model.last(x.relu() if model.first.weight.norm() > 0 else x)


def branches_on_mode(model: Written, x: Tensor) -> Tensor:
    x = model.second(model.first(x))
    return model.last(x.relu() if model.training else x)


def always_drops(model: Written, x: Tensor) -> Tensor:
    return model.last(model.second(F.dropout(model.first(x), 0.5)))


def draws_in_python(model: Written, x: Tensor) -> Tensor:
    x = model.second(model.first(x))
    random.random()
    return model.last(x)


def draws_in_numpy(model: Written, x: Tensor) -> Tensor:
    np.random.rand()  # noqa: NPY002
    return model.last(model.second(model.first(x)))


def seeds(model: Written, x: Tensor) -> Tensor:
    torch.manual_seed(torch.initial_seed() + 1)
    return model.last(model.second(model.first(x)))


def stores(model: Written, x: Tensor) -> Tensor:
    model.hidden = model.first(x)
    return model.last(model.second(model.hidden))


def without_gradient(model: Written, x: Tensor) -> Tensor:
    with torch.no_grad():
        x = model.first(x)
    return model.last(model.second(x))


def detaches(model: Written, x: Tensor) -> Tensor:
    return model.last(model.second(model.first(x).detach()))


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


REFUSED: dict[str, tuple[Callable[[Written, Tensor], object], str]] = {
    "values": (branches_on_values, "calls sum"),
    "rows": (branches_on_rows, "depends on the number of rows"),
    "weights": (branches_on_weights, "calls norm on something else"),
    "mode": (branches_on_mode, "something else in evaluation"),
    "dropout in evaluation": (always_drops, "drops units in evaluation"),
    "Python's random": (draws_in_python, "draws random numbers"),
    "NumPy's random": (draws_in_numpy, "draws random numbers"),
    "PyTorch's random": (lambda m, x: m.last(m.second(m.first(x) + torch.rand(1))), "calls rand"),
    "PyTorch's seed": (seeds, "draws random numbers"),
    "attributes": (stores, "changes the attributes of 'the model'"),
    "no gradient": (without_gradient, "forward (switches gradients off|calls _set_grad_enabled)"),
    "detach": (detaches, "calls detach"),
    "autograd function": (lambda m, x: m.last(m.second(Reversed.apply(m.first(x)))), "calls view_as"),
    "scaled weight": (lambda m, x: m.last(F.linear(m.first(x), m.second.weight * 2)), "calls mul"),
    "used twice": (lambda m, x: m.last(m.second(m.second(m.first(x)))), "second.weight is used twice"),
    "unused": (lambda m, x: m.last(m.first(x)), "forward does not use second.weight"),
    "two outputs": (lambda m, x: (m.last(m.second(m.first(x))), x), "does not return the output"),
    "unused layer": (lambda m, x: (h := m.second(m.first(x)), h.relu(), m.last(h))[2], "branches"),
    "softmax": (lambda m, x: m.last(m.second(m.first(x))).softmax(1), "calls softmax"),
    "scaled": (lambda m, x: m.last(m.second(m.first(x)) * 2), "calls mul"),
    "a number added": (lambda m, x: m.last(m.second(m.first(x)) + 1), "adds something else"),
    "added to itself": (lambda m, x: m.last((h := m.second(m.first(x))) + h), "adds a tensor to itself"),
    "two branches": (lambda m, x: m.last(m.first(x) + m.first(x)), "branches|used twice"),
    "fails": (lambda m, x: m.missing(x), "forward fails in a trial: .*missing"),
    "transposed": (lambda m, x: m.last(m.second(m.first(x.T.T))), "calls __get__"),
    "autocast": (lambda m, x: _autocast(m, x), "autocast"),
}  # fmt: skip


def _autocast(model: Written, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model.last(model.second(model.first(x)))


@pytest.mark.parametrize("name", REFUSED)
def test_whatever_else_forward_does_is_refused(name):
    run, reason = REFUSED[name]
    model = Written(run)
    before = {path: dict(vars(module)) for path, module in model.named_modules()}
    with pytest.raises(NotAnMlpError, match=reason):
        parse_network(model)
    assert {path: vars(module) for path, module in model.named_modules()} == before


def test_modes_are_restored():
    model = sequential()
    model[2].eval()
    parse_network(model)
    assert model.training
    assert not model[2].training


class Frozen(nn.Module):
    """Keeps its norm in evaluation mode, as fine-tuning does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.last = nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.linear(x)))


def test_a_norm_that_stays_in_evaluation_is_refused():
    with pytest.raises(NotAnMlpError, match="'norm' is in another mode"):
        parse_network(Frozen())


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.pool = nn.Conv2d(1, 2, 3), nn.Conv2d(2, 2, 3), nn.MaxPool2d(2)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.conv2(F.relu(self.conv1(x)))).flatten(1))


def test_falling_back_is_said_once_in_one_line(caplog):
    x, y = torch.randn(20, 1, 8, 8), torch.randint(3, (20,))
    with caplog.at_level(logging.WARNING, "onelaunch"):
        for _ in range(2):
            history = ol.fit(Convolutions(), x, y, epochs=1, progress=False)
    assert history.engine == "eager"
    lines = [record.getMessage() for record in caplog.records if record.name == "onelaunch"]
    assert len(lines) == 1
    assert "conv1 (Conv2d), conv2 (Conv2d), pool (MaxPool2d)" in lines[0]
    assert "\n" not in lines[0]
    assert "times faster" in lines[0]


def test_other_threads_may_draw_random_numbers():
    """As they do when they make models of their own."""
    ended = threading.Event()

    def draw() -> None:
        while not ended.is_set():
            nn.Linear(8, 8)

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        for _ in range(50):
            parse_network(nn.Sequential(nn.Linear(7, 8), nn.ReLU(), nn.Linear(8, 3)))
    finally:
        ended.set()
        thread.join()
