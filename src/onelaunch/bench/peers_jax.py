"""A training run as a JAX scan: all steps in one call, without Python between them. The strongest peer on small networks."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from onelaunch.engines.contract import Run
from onelaunch.errors import UnsupportedError
from onelaunch.run.network import Activation, Add, Flatten, LayerNorm, Linear, tensor_name

MATMUL = {"fp32": "highest", "auto": "tensorfloat32", "tf32": "tensorfloat32", "bf16": None}


def jax_unavailable_reason(device: torch.device) -> str:
    """Why JAX cannot train on `device`; empty when it can."""
    if importlib.util.find_spec("jax") is None:
        return "jax is not installed"
    os.environ.setdefault(
        "XLA_PYTHON_CLIENT_PREALLOCATE", "false"
    )  # otherwise JAX takes most of the GPU's memory at once
    import jax

    platform = jax.devices()[0].platform
    return "" if (platform == "gpu") == (device.type == "cuda") else f"this jax runs on the {platform}, not on {device}"


def jax_scan(run: Run, order: torch.Tensor, unroll: int = 1) -> Callable[[], Any]:
    """A function that trains one step per line of `order`, from where its last call ended, and then validates if the run does.

    It returns the losses and the validation loss. Master weights are fp32; for bf16 the operands of each product are cast, as
    autocast and our engines do. Raises UnsupportedError where JAX cannot run on the run's device.
    """
    if reason := jax_unavailable_reason(run.device):
        raise UnsupportedError(reason)
    import jax
    import jax.numpy as jnp

    flattens = any(isinstance(layer, nn.Flatten) for layer in run.model.modules())

    def rows_of(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (x.flatten(1) if flattens else x), y

    tensors = (*rows_of(run.x, run.y), order.int(), *(rows_of(*run.validation) if run.validation else ()))
    data = tuple(jnp.asarray(tensor.cpu().numpy()) for tensor in tensors)
    layers = {name: jnp.asarray(tensor.detach().cpu().numpy()) for name, tensor in run.model.named_parameters()}
    loss_of = jax_loss(run)
    update, state = jax_optimizer(run, layers)

    def train(carry: Any, x: Any, y: Any, order: Any, *validation: Any) -> Any:
        def step(carry: Any, rows: Any) -> Any:
            layers, state = carry
            loss, gradients = jax.value_and_grad(loss_of)(layers, features(x[rows]), y[rows])
            return update(layers, gradients, state), loss

        carry, losses = jax.lax.scan(step, carry, order, unroll=unroll)
        if not validation:
            return carry, losses, None
        return carry, losses, loss_of(carry[0], features(validation[0]), validation[1])

    with jax.default_matmul_precision(MATMUL[run.spec.precision]):
        compiled = jax.jit(train).lower((layers, state), *data).compile()
    carried = [(layers, state)]

    def work() -> Any:
        carried[0], losses, validation = compiled(carried[0], *data)
        return jax.block_until_ready((losses, validation))

    return work


def jax_loss(run: Run) -> Callable[[Any, Any, Any], Any]:
    """The mean loss of a batch, from (parameters by name, features, targets)."""
    import jax
    import jax.numpy as jnp

    spec = run.spec
    products = jnp.bfloat16 if spec.precision == "bf16" else jnp.float32

    network = run.network
    assert network is not None

    def forward(layers: Any, h: Any) -> Any:
        values = {-1: h}
        for index, layer in enumerate(network.layers):
            match layer:
                case Linear():
                    h = h.astype(products) @ layers[tensor_name(layer.path, "weight")].T.astype(products)
                    h = h + layers[tensor_name(layer.path, "bias")].astype(products) if layer.bias else h
                case LayerNorm():
                    h = h.astype(jnp.float32)
                    gap = h - h.mean(axis=1, keepdims=True)
                    h = gap * jax.lax.rsqrt((gap * gap).mean(axis=1, keepdims=True) + layer.eps)
                    h = h * layers[tensor_name(layer.path, "weight")] + layers[tensor_name(layer.path, "bias")]
                case Activation():
                    assert layer.name == "relu"
                    h = jax.nn.relu(h)
                case Add():
                    h = h + values[layer.source]
                case _:
                    assert isinstance(layer, Flatten), layer
            values[index] = h
        return h.astype(jnp.float32)

    def loss_of(layers: Any, features: Any, target: Any) -> Any:
        output = forward(layers, features)
        if spec.loss == "mse":
            return jnp.mean((output - target) ** 2)
        assert spec.loss == "cross_entropy", spec.loss
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(output), target[:, None], axis=1))

    return loss_of


def features(rows: Any) -> Any:
    """Rows as the network takes them: bytes mean value / 255."""
    import jax.numpy as jnp

    return rows.astype(jnp.float32) / 255 if rows.dtype == jnp.uint8 else rows


def jax_optimizer(run: Run, layers: Any) -> tuple[Callable[[Any, Any, Any], Any], Any]:
    """The update, from (layers, gradients, state) to (layers, state), and the initial state."""
    import jax
    import jax.numpy as jnp

    spec, each = run.spec, jax.tree.map
    assert spec.schedule == "constant"
    if spec.optimizer == "sgd":
        assert not spec.momentum
        return lambda layers, gradients, state: (each(lambda p, g: p - spec.lr * g, layers, gradients), state), ()
    assert spec.optimizer == "adam"
    first, second = spec.betas

    def adam(layers: Any, gradients: Any, state: Any) -> Any:
        means, squares, step = state
        step = step + 1
        means = each(lambda m, g: first * m + (1 - first) * g, means, gradients)
        squares = each(lambda s, g: second * s + (1 - second) * g * g, squares, gradients)
        scale, root = spec.lr / (1 - first**step), jnp.sqrt(1 - second**step)
        layers = each(lambda p, m, s: p - scale * m / (jnp.sqrt(s) / root + spec.eps), layers, means, squares)
        return layers, (means, squares, step)

    zeros = each(jnp.zeros_like, layers)
    return adam, (zeros, zeros, jnp.float32(0))
