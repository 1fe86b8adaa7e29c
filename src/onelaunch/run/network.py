"""The layers of a model, for the engines that compile it: an `nn.Sequential` as a tuple of plain data.

`parse_network(model)` either describes every layer or says in one line why it cannot. Only exact `torch.nn` types count: a
subclass, a hook or a frozen weight may mean anything. A model that has one trains on the eager engine instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules import module as every_module

from onelaunch.activations import ACTIVATIONS, find_activation
from onelaunch.errors import abbreviate

GLOBAL_HOOKS = (  # of `register_module_forward_hook` and its siblings
    every_module._global_forward_hooks, every_module._global_forward_pre_hooks, every_module._global_backward_hooks,
    every_module._global_backward_pre_hooks,
)  # fmt: skip


@dataclass(frozen=True)
class Flatten:
    """Joins all values of a row into one vector."""


@dataclass(frozen=True)
class Linear:
    path: str  # the module's name: its tensors are `path + ".weight"` and `path + ".bias"` in the state_dict
    inputs: int
    outputs: int
    bias: bool


@dataclass(frozen=True)
class Activation:
    name: str  # a key of onelaunch.activations.ACTIVATIONS
    slope: float = 0.0  # of leaky_relu below zero


@dataclass(frozen=True)
class Dropout:
    p: float
    layer: int  # the `layer` of onelaunch.rng: the module's number among the dropout modules; higher for a second use


@dataclass(frozen=True)
class BatchNorm:
    path: str
    features: int
    eps: float
    momentum: float | None  # None: running statistics are averages over all steps
    affine: bool
    tracks: bool  # whether it keeps running statistics; without them, evaluation normalises by the batch


Layer = Flatten | Linear | Activation | Dropout | BatchNorm


class NotAnMlpError(Exception):
    """The native engines cannot take the model as an MLP, for the reason in the message."""


@dataclass(frozen=True)
class Network:
    layers: tuple[Layer, ...]

    @property
    def linears(self) -> tuple[Linear, ...]:
        return tuple(layer for layer in self.layers if isinstance(layer, Linear))

    @property
    def inputs(self) -> int:
        return self.linears[0].inputs

    @property
    def outputs(self) -> int:
        return self.linears[-1].outputs

    @property
    def flattens(self) -> bool:
        return any(isinstance(layer, Flatten) for layer in self.layers)

    def __str__(self) -> str:
        """`784-128-10` for a chain of Linears of these widths."""
        return "-".join(str(width) for width in [self.inputs, *(linear.outputs for linear in self.linears)])


def parse_network(model: nn.Module) -> Network:
    """The layers of `model`, or NotAnMlpError with the reason."""
    if type(model) is not nn.Sequential:
        raise NotAnMlpError(f"the model is a {type(model).__name__}, not an nn.Sequential")
    layers: list[Layer] = []
    uses: dict[int, int] = {}
    dropouts = {id(module): number for number, module in enumerate(m for m in model.modules() if type(m) is nn.Dropout)}
    for path, module in _leaves(model, ""):
        _refuse_extras(path, module)
        earlier_uses = uses.get(id(module), 0)
        if earlier_uses and module.state_dict():
            raise NotAnMlpError(f"layer {path!r} is used twice")
        uses[id(module)] = earlier_uses + 1
        # Numbered as in the eager engine: a module's second use comes after the first uses of all.
        layer = _layer(path, module, dropouts.get(id(module), 0) + earlier_uses * len(dropouts))
        if layer is not None:
            layers.append(layer)
    _refuse_misfits(layers)
    owners: dict[int, str] = {}
    buffers = model.named_buffers(remove_duplicate=False)
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *buffers]:
        if owners.setdefault(tensor.data_ptr(), name) != name and tensor.numel():
            raise NotAnMlpError(f"{owners[tensor.data_ptr()]} and {name} share their memory")
        if tensor.is_floating_point() and tensor.dtype != torch.float32:
            raise NotAnMlpError(f"{name} is {tensor.dtype}, not torch.float32")
        if isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
            raise NotAnMlpError(f"{name} is frozen (requires_grad=False)")
    return Network(tuple(layers))


def _leaves(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """(path, module) of every module inside nested Sequentials, in order."""
    _refuse_extras(prefix, module)
    for name, child in module._modules.items():
        path = f"{prefix}.{name}" if prefix else name
        if type(child) is nn.Sequential:
            yield from _leaves(child, path)
        elif child is not None:
            yield path, child


def _refuse_extras(path: str, module: nn.Module) -> None:
    """Refuse hooks and the like, which an engine that does not call the module would skip."""
    hooks = (
        module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks,
        module._state_dict_hooks, module._state_dict_pre_hooks, module._load_state_dict_pre_hooks,
    )  # fmt: skip
    if any(hooks) or "forward" in vars(module) or hasattr(module, "parametrizations"):
        raise NotAnMlpError(f"layer {path or 'the model itself'!r} has a hook, a parametrization or its own forward")
    for name, parameter in module._parameters.items():
        if parameter is not None and (parameter._backward_hooks or parameter._post_accumulate_grad_hooks):
            raise NotAnMlpError(f"{name} of layer {path!r} has a hook")
    if any(GLOBAL_HOOKS):
        raise NotAnMlpError("a hook on all modules is registered")


def _layer(path: str, module: nn.Module, dropout: int) -> Layer | None:
    """The description of one module; None for nn.Identity. `dropout` is the module's number if it is a dropout."""
    match module:
        case nn.Linear() if type(module) is nn.Linear:
            _require_shapes(path, module, (module.out_features, module.in_features), (module.out_features,))
            return Linear(path, int(module.in_features), int(module.out_features), module.bias is not None)
        case nn.Flatten() if type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1):
            return Flatten()
        case nn.Dropout() if type(module) is nn.Dropout:
            return Dropout(float(module.p), dropout)
        case nn.BatchNorm1d() if type(module) is nn.BatchNorm1d:
            tracks = module.running_mean is not None
            if tracks != module.track_running_stats:
                raise NotAnMlpError(f"layer {path!r} has running statistics, but they are switched off")
            _require_shapes(path, module, (module.num_features,), (module.num_features,))
            momentum = None if module.momentum is None else float(module.momentum)
            return BatchNorm(path, int(module.num_features), float(module.eps), momentum, module.affine, tracks)
        case nn.Identity() if type(module) is nn.Identity:
            return None
        case _ if (activation := find_activation(module)) is not None:
            slope = float(module.negative_slope) if isinstance(module, nn.LeakyReLU) else 0.0
            if not abs(slope) < torch.finfo(torch.float32).max:
                raise NotAnMlpError(f"layer {path!r} has the slope {slope}, which float32 does not hold")
            return Activation(activation.name, slope)
    raise NotAnMlpError(f"layer {path!r} is {abbreviate(module)}, which only the eager engine takes{_remedy(module)}")


def _remedy(module: nn.Module) -> str:
    """`" (alpha=2.0; the native engines take 1.0)"` for a known activation with other settings, else an empty string."""
    entries = [entry for entry in ACTIVATIONS.values() if type(module) is entry.module]
    for name, known in entries[0].settings.items() if entries else ():
        if getattr(module, name) != known:
            return f" ({name}={getattr(module, name)!r}; the native engines take {known!r})"
    return ""


def _require_shapes(path: str, module: nn.Module, weight: tuple[int, ...], bias: tuple[int, ...]) -> None:
    """Refuse a parameter that the user has replaced by one of another shape than the module's attributes say."""
    for name, expected in (("weight", weight), ("bias", bias)):
        tensor = getattr(module, name)
        if tensor is not None and (tuple(tensor.shape) != expected or 0 in expected):
            raise NotAnMlpError(f"{name} of layer {path!r} has shape {tuple(tensor.shape)}, not {expected} or is empty")


def _refuse_misfits(layers: list[Layer]) -> None:
    """Refuse layers whose widths do not match their neighbours', and a model without a Linear."""
    if not any(isinstance(layer, Linear) for layer in layers):
        raise NotAnMlpError("the model has no Linear layer")
    width: int | None = None
    for position, layer in enumerate(layers):
        if isinstance(layer, Flatten) and any(not isinstance(earlier, Flatten) for earlier in layers[:position]):
            raise NotAnMlpError("a Flatten follows another layer")
        takes = layer.inputs if isinstance(layer, Linear) else layer.features if isinstance(layer, BatchNorm) else width
        if width is not None and takes != width:
            raise NotAnMlpError(f"a layer of {takes} inputs follows one of {width} outputs")
        width = layer.outputs if isinstance(layer, Linear) else takes
