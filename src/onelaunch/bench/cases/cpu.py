"""The CPU engine against what else trains a small network on a CPU: a step of each, data in memory, the same batches.

Peers: PyTorch as written, PyTorch compiled, a JAX scan over a whole epoch (one call, no interpreter between steps, the
strongest of them) and scikit-learn's MLPClassifier. Each call of a contender is one epoch over ROWS rows, or several for a
network so small that waking up would weigh as much as the work (64-32-10: an epoch is 1 ms).
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import itertools
import tempfile
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from onelaunch.bench.case import Trial, Work, case
from onelaunch.rng import permutation
from onelaunch.train.engines.contract import Segment
from onelaunch.train.engines.cpu.session import CpuSession
from onelaunch.train.inputs import make_run

ROWS, CHECKED_STEPS = 8192, 50
TINY, EPOCHS_IF_TINY = 10_000, 10  # weights
LEARNING_RATE = {"sgd": 0.01, "adam": 1e-3}
ENDLESS = 2**20  # epochs: more than any benchmark runs


class _Silent:
    """A Monitor nobody listens to."""

    stop = False

    def report(self, step: int, loss: float, correct: int | None) -> None:
        pass


def _network(widths: tuple[int, ...]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _data(widths: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(ROWS, widths[0]), torch.randint(widths[-1], (ROWS,))


def _optimizer(model: nn.Module, name: str) -> torch.optim.Optimizer:
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[name]
    return kind(model.parameters(), lr=LEARNING_RATE[name])


def _ours(widths: tuple[int, ...], batch: int, optimizer: str) -> Work:
    """An endless run, an epoch a call."""
    x, y = _data(widths)
    options = {"epochs": ENDLESS, "batch_size": batch, "optimizer": optimizer, "lr": LEARNING_RATE[optimizer]}
    session = CpuSession(make_run(_network(widths), x, y, None, options), {})
    segments: Iterator[Segment] = session.segments(0, _Silent())
    return functools.partial(next, segments)


def _torch_epoch(widths: tuple[int, ...], batch: int, optimizer_name: str, wrap: Callable[[Any], Any]) -> Work:
    x, y = _data(widths)
    model = _network(widths)
    optimizer = _optimizer(model, optimizer_name)
    loss_of = wrap(lambda rows: F.cross_entropy(model(x[rows]), y[rows]))

    def epoch() -> None:
        for rows in permutation(ROWS, 0, 0).split(batch):
            optimizer.zero_grad()
            loss_of(rows).backward()
            optimizer.step()

    return epoch


def _scikit_learn_epoch(widths: tuple[int, ...], batch: int, optimizer: str) -> Work:
    from sklearn.neural_network import MLPClassifier

    x, y = (tensor.numpy() for tensor in _data(widths))
    model = MLPClassifier(
        widths[1:-1],
        solver=optimizer,
        alpha=0.0,
        batch_size=batch,
        learning_rate_init=LEARNING_RATE[optimizer],
        momentum=0.0,
    )
    return lambda: model.partial_fit(x, y, classes=range(widths[-1]))


def _jax_epoch(widths: tuple[int, ...], batch: int, optimizer: str) -> Work:
    import jax
    import jax.numpy as jnp

    x, y = (jnp.asarray(tensor.numpy()) for tensor in _data(widths))
    model = _network(widths)
    parameters = [jnp.asarray(parameter.detach().numpy()) for parameter in model.parameters()]
    order = jnp.asarray(permutation(ROWS, 0, 0).numpy().reshape(-1, batch))
    rate = LEARNING_RATE[optimizer]

    def loss_of(parameters: Any, rows: Any) -> Any:
        h = x[rows]
        for layer in range(0, len(parameters), 2):
            h = h @ parameters[layer].T + parameters[layer + 1]
            h = jax.nn.relu(h) if layer + 2 < len(parameters) else h
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(h), y[rows][:, None], axis=1))

    def sgd(carry: Any, rows: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(carry, rows)
        return jax.tree.map(lambda p, g: p - rate * g, carry, gradients), loss

    def adam(carry: Any, rows: Any) -> Any:
        parameters, means, squares, step = carry
        loss, gradients = jax.value_and_grad(loss_of)(parameters, rows)
        step = step + 1
        means = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, means, gradients)
        squares = jax.tree.map(lambda s, g: 0.999 * s + 0.001 * g * g, squares, gradients)
        scale, root = rate / (1 - 0.9**step), jnp.sqrt(1 - 0.999**step)
        parameters = jax.tree.map(
            lambda p, m, s: p - scale * m / (jnp.sqrt(s) / root + 1e-8), parameters, means, squares
        )
        return (parameters, means, squares, step), loss

    zeros = jax.tree.map(jnp.zeros_like, parameters)
    state: list[Any] = [parameters if optimizer == "sgd" else (parameters, zeros, zeros, jnp.float32(0))]
    scan = jax.jit(lambda carry: jax.lax.scan(sgd if optimizer == "sgd" else adam, carry, order))

    def epoch() -> None:
        state[0], losses = scan(state[0])
        losses.block_until_ready()

    return epoch


def _check(widths: tuple[int, ...], batch: int, optimizer_name: str) -> None:
    """The first losses against a plain float64 loop over the same rows."""
    x, y = _data(widths)
    model = _network(widths)
    reference = copy.deepcopy(model).double()
    optimizer = _optimizer(reference, optimizer_name)
    expected = []
    for rows in permutation(ROWS, 0, 0).split(batch)[:CHECKED_STEPS]:
        optimizer.zero_grad()
        loss = F.cross_entropy(reference(x[rows].double()), y[rows])
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    options = {
        "steps": CHECKED_STEPS, "batch_size": batch, "optimizer": optimizer_name, "lr": LEARNING_RATE[optimizer_name]
    }  # fmt: skip
    session = CpuSession(make_run(model, x, y, None, options), {})
    got = torch.cat([segment.losses for segment in session.segments(0, _Silent())])
    session.close()
    torch.testing.assert_close(got.double(), torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-6)


def _trial(widths: tuple[int, ...], batch: int, optimizer: str) -> Trial:
    torch.manual_seed(0)
    peers = {
        "torch eager": _torch_epoch(widths, batch, optimizer, lambda function: function),
        "torch.compile": _torch_epoch(widths, batch, optimizer, torch.compile),
        "scikit-learn": _scikit_learn_epoch(widths, batch, optimizer),
    }
    absent = {}
    if importlib.util.find_spec("jax"):
        peers["JAX scan"] = _jax_epoch(widths, batch, optimizer)
    else:
        absent["JAX scan"] = "jax is not installed"
    epochs = EPOCHS_IF_TINY if sum(i * o for i, o in pairwise(widths)) < TINY else 1
    return Trial(
        ours=_repeated(_ours(widths, batch, optimizer), epochs),
        check=lambda: _check(widths, batch, optimizer),
        peers={name: _repeated(work, epochs) for name, work in peers.items()},
        absent=absent,
        units=epochs * (ROWS // batch),
        floor_flops=epochs * ROWS * _flops_a_row(widths),
    )


def _flops_a_row(widths: tuple[int, ...]) -> int:
    """Products of forward, dW and dX; the input needs no dX."""
    products = [inputs * outputs for inputs, outputs in pairwise(widths)]
    return 6 * sum(products) - 2 * products[0]


def _repeated(work: Work, times: int) -> Work:
    def several() -> None:
        for _ in range(times):
            work()

    return several


def _register(widths: tuple[int, ...], batch: int, optimizer: str) -> None:
    name = "-".join(map(str, widths))
    case(
        f"cpu/{name}/{batch}/{optimizer}", "cpu", f"{name}, batch {batch}, {optimizer}, fp32: an epoch of {ROWS} rows"
    )(lambda: _trial(widths, batch, optimizer))


for _widths, _batch, _optimizer_name in (
    ((64, 32, 10), 32, "sgd"),
    ((784, 128, 128, 128, 10), 32, "sgd"),
    ((784, 784, 784, 784, 10), 64, "sgd"),
    ((784, 512, 512, 10), 128, "sgd"),
    ((784, 128, 128, 128, 10), 32, "adam"),
):
    _register(_widths, _batch, _optimizer_name)


def _start_trial(warm: bool) -> Trial:
    widths = (784, 128, 128, 128, 10)
    torch.manual_seed(0)
    x, y = _data(widths)
    run = make_run(_network(widths), x, y, None, {"epochs": 1, "batch_size": 32})
    keep = tempfile.TemporaryDirectory(prefix="onelaunch-bench-")

    def start() -> None:
        if warm:
            CpuSession(run, {}, place=Path(keep.name)).close()
            return
        with tempfile.TemporaryDirectory(prefix="onelaunch-bench-") as fresh:
            CpuSession(run, {}, place=Path(fresh)).close()

    return Trial(ours=start, check=start)


@case("cpu/start/new", "cpu", "784-128-128-128-10: code made for a network not seen before", unit="start")
def start_new() -> Trial:
    return _start_trial(warm=False)


@case("cpu/start/cached", "cpu", "784-128-128-128-10: code of an earlier run loaded from disk", unit="start")
def start_cached() -> Trial:
    return _start_trial(warm=True)
