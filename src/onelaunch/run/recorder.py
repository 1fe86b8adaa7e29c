"""Records the layers that a module's forward applies, as `onelaunch.run.network` describes them.

`Recorder` runs forward on a tensor without data. Known modules and functions append a layer to a list and return a new
tensor without data; everything else is refused. What a forward computes is therefore either recorded completely or
refused: an unknown function, a branch that reads values, a context without gradients, or a tensor from another source
cannot pass unnoticed. The layers must form a chain, in which only a sum may look further back than to the layer before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from onelaunch import nn as fused
from onelaunch.activations import ACTIVATIONS, find_activation
from onelaunch.errors import abbreviate
from onelaunch.run.dropouts import DROPOUTS, dropout_arguments, dropout_modules
from onelaunch.run.known_functions import (
    ACTIVATION_FUNCTIONS,
    DEVICE,
    IN_PLACE,
    IS_CUDA,
    QUERIES,
    RESHAPES,
    SAME_VALUES,
    SUMS,
    SUMS_IN_PLACE,
    settings_remedy,
)
from onelaunch.run.network import (
    Activation,
    Add,
    BatchNorm,
    Dropout,
    Flatten,
    Layer,
    LayerNorm,
    Linear,
    Network,
    NotAnMlpError,
    tensor_name,
)


@dataclass(frozen=True)
class _DropoutCall(Dropout):
    call: int  # how often the module was called before in this forward


class Recorder(TorchFunctionMode):
    """Passes through forward, each in the mode (training or evaluation) that the modules are in."""

    def __init__(self, model: nn.Module, names: Mapping[int, str], device: torch.device) -> None:
        """`names` maps the id of each tensor of the state_dict to its name."""
        super().__init__()
        self.model, self.names, self.device = model, names, device
        self._numbers = {id(module): number for number, module in enumerate(dropout_modules(model))}

    def _begin(self) -> None:
        self.layers: list[Layer] = []
        self.used: list[str] = []  # parameters and buffers by name, in the order of their use
        self.functional_dropouts = 0
        self._calls: dict[int, int] = {}
        self._values: dict[int, tuple[int, Tensor]] = {}  # by id of a tensor: the layer that made it, the tensor
        self._viewed: set[int] = set()  # tensors that have, or are, a view

    def record(self, rows: int, row_shape: tuple[int, ...]) -> Network:
        """The layers that forward applies to a batch of `rows` rows. Raises NotAnMlpError where it does anything else."""
        if not row_shape:
            raise MisfitError("rows are single numbers")
        self._begin()
        x = self._keep(torch.empty(rows, *row_shape, device="meta"), -1)
        try:
            with torch.enable_grad(), self:
                output = self.model(x)
        except NotAnMlpError:
            raise
        except Exception as error:  # a user's forward may raise anything
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise NotAnMlpError(f"forward fails in a trial: {reason}") from error
        if not isinstance(output, Tensor) or self._values.get(id(output), (None,))[0] != len(self.layers) - 1:
            raise NotAnMlpError("forward does not return the output of its last layer")
        return Network(tuple(map(self._numbered, self.layers)), self.functional_dropouts)

    def _numbered(self, layer: Layer) -> Layer:
        """A dropout's number as in the eager engine: a module's second use comes after the first uses of all."""
        if not isinstance(layer, _DropoutCall):
            return layer
        return Dropout(layer.p, layer.layer + layer.call * (len(self._numbers) + self.functional_dropouts))

    def leaf_forward(self, module: nn.Module, path: str) -> Callable[..., Tensor]:
        """What replaces `module.forward` while forward is recorded."""

        def forward(*args: Any, **kwargs: Any) -> Tensor:
            x = args[0] if args else kwargs.get("input")
            if len(args) + len(kwargs) != 1 or not isinstance(x, Tensor) or id(x) not in self._values:
                raise NotAnMlpError(f"layer {path!r} takes something else than the output of a layer")
            with torch._C.DisableTorchFunction():
                return self._module(module, path, x)

        return forward

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func in QUERIES:
            return func(*args, **options)
        if func == DEVICE:  # the user's rows are there, unlike the tensors of this pass
            return self.device
        if func == IS_CUDA:
            return self.device.type == "cuda"
        x = args[0] if args else options.pop("input", None)
        rest = args[1:]
        name = getattr(func, "__name__", str(func))
        if not isinstance(x, Tensor) or id(x) not in self._values:
            raise NotAnMlpError(f"forward calls {name} on something else than the output of a layer")
        if func in RESHAPES:
            return self._reshape(x, func(x, *rest, **options), name)
        if func in SAME_VALUES and not rest and not options:
            return x
        if func in SUMS | SUMS_IN_PLACE and len(rest) == 1 and not options:
            return self._sum(x, rest[0], in_place=func in SUMS_IN_PLACE)
        if func is F.linear:
            return self._functional_linear(x, *rest, **options)
        if func in DROPOUTS:
            return self._functional_dropout(*dropout_arguments(x, *rest, **options))
        if func in IN_PLACE and not rest and not options:
            return self._activation(x, IN_PLACE[func](), f"the call of {name}", in_place=True)
        if func in ACTIVATION_FUNCTIONS and len(rest) <= len(ACTIVATION_FUNCTIONS[func][1]):
            kind, arguments = ACTIVATION_FUNCTIONS[func]
            module = kind(**(dict(zip(arguments, rest, strict=False)) | options))
            return self._activation(x, module, f"the call of {name}", in_place=getattr(module, "inplace", False))
        raise NotAnMlpError(f"forward calls {name}")

    def _keep(self, value: Tensor, layer: int) -> Tensor:
        self._values[id(value)] = (layer, value)
        return value

    def _add(self, x: Tensor, layer: Layer, width: int | None = None, *, in_place: bool = False) -> Tensor:
        """Append a layer that takes `x` and return its output, of `width` features (None: as many as x)."""
        if not torch.is_grad_enabled() or torch.is_autocast_enabled(self.device.type):
            raise NotAnMlpError("forward switches gradients off or autocast on")
        if self._values[id(x)][0] != len(self.layers) - 1:
            raise NotAnMlpError("forward branches other than by adding an earlier layer's output")
        if in_place and id(x) in self._viewed:
            raise NotAnMlpError("forward changes a tensor in place that has a view")
        self.layers.append(layer)
        if in_place:
            return self._keep(x, len(self.layers) - 1)
        shape = x.shape if width is None else (*x.shape[:-1], width)
        return self._keep(torch.empty(shape, device="meta"), len(self.layers) - 1)

    def _use(self, *names: str) -> None:
        for name in names:
            if name in self.used:
                raise NotAnMlpError(f"{name} is used twice")
            self.used.append(name)

    def _module(self, module: nn.Module, path: str, x: Tensor) -> Tensor:
        match module:
            case nn.Linear():
                x = self._linear(x, module.weight, module.bias)
            case nn.Flatten():
                return self._reshape(x, x.flatten(module.start_dim, module.end_dim), f"layer {path!r}")
            case nn.BatchNorm1d():
                x = self._batch_norm(x, module, path)
            case nn.LayerNorm():
                return self._layer_norm(x, module, path)
            case nn.Identity():
                return x
            case nn.Dropout():
                return self._dropout(x, module, float(module.p), in_place=module.inplace)
            case fused.ReLUDropout():
                x = self._add(x, Activation("relu"), in_place=module.inplace)
                return self._dropout(x, module, float(module.p), in_place=module.inplace)
            case _:
                return self._activation(x, module, f"layer {path!r}", in_place=getattr(module, "inplace", False))
        if isinstance(module, fused.Linear | fused.BatchNorm1d):
            if module.activation is not None:
                x = self._activation(x, ACTIVATIONS[module.activation].make_module(), f"layer {path!r}", in_place=False)
            if module.dropout:
                x = self._dropout(x, module, float(module.dropout), in_place=False)
        return x

    def _reshape(self, x: Tensor, reshaped: Tensor, what: str) -> Tensor:
        """Rows may take any shape before the first layer and must be vectors after it."""
        layer, _ = self._values[id(x)]
        raw = all(isinstance(earlier, Flatten) for earlier in self.layers)
        if reshaped.shape[:1] != x.shape[:1] or (not raw and reshaped.shape != x.shape):
            raise NotAnMlpError(f"{what} changes the shape {list(x.shape)} of a batch to {list(reshaped.shape)}")
        self._viewed |= {id(x), id(reshaped)}
        if raw and reshaped.ndim == 2 and layer == len(self.layers) - 1 and not self.layers:
            self._keep(reshaped, layer)
            self.layers.append(Flatten())
            layer = 0
        return self._keep(reshaped, layer)

    def _sum(self, a: Tensor, b: Any, *, in_place: bool) -> Tensor:
        if not isinstance(b, Tensor) or id(b) not in self._values or a.shape != b.shape:
            raise NotAnMlpError("forward adds something else than the outputs of two layers of equal width")
        layers = [self._values[id(value)][0] for value in (a, b)]
        if layers[0] == layers[1] or (in_place and layers[0] < layers[1]):
            raise NotAnMlpError("forward adds a tensor to itself or in place")
        newest, source = (a, layers[1]) if layers[0] > layers[1] else (b, layers[0])
        return self._add(newest, Add(source), in_place=in_place)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        name = self.names.get(id(weight), "")
        path = name.removesuffix("weight").removesuffix(".")
        names = [tensor_name(path, "weight"), *([tensor_name(path, "bias")] if bias is not None else [])]
        if name != names[0] or (bias is not None and self.names.get(id(bias)) != names[1]):
            raise NotAnMlpError("forward calls linear with tensors that are not the weight and the bias of a module")
        outputs, inputs = weight.shape
        require_shapes(path, weight, bias, (outputs, inputs), (outputs,))
        self._require_width(x, inputs)
        self._use(*names)
        return self._add(x, Linear(path, inputs, outputs, bias is not None), outputs)

    def _functional_linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self._linear(x, weight, bias)

    def _functional_dropout(self, x: Tensor, p: float, active: bool) -> Tensor:
        if not active:
            return x
        if not self.model.training:
            raise NotAnMlpError("forward drops units in evaluation too: pass training=self.training to dropout")
        number = len(self._numbers) + self.functional_dropouts
        self.functional_dropouts += 1
        return self._add(x, Dropout(p, number))

    def _dropout(self, x: Tensor, module: nn.Module, p: float, *, in_place: bool) -> Tensor:
        if module.training != self.model.training:
            raise NotAnMlpError("a dropout is in another mode (training or evaluation) than the model")
        if not module.training:
            return x
        call = self._calls.get(id(module), 0)
        self._calls[id(module)] = call + 1
        return self._add(x, _DropoutCall(p, self._numbers[id(module)], call), in_place=in_place)

    def _activation(self, x: Tensor, module: nn.Module, what: str, *, in_place: bool) -> Tensor:
        entry = find_activation(module)
        if entry is None:
            raise NotAnMlpError(f"{what} is {abbreviate(module)}{settings_remedy(module)}")
        slope = float(module.negative_slope) if isinstance(module, nn.LeakyReLU) else 0.0
        if not abs(slope) < torch.finfo(torch.float32).max:
            raise NotAnMlpError(f"{what} has the slope {slope}, which float32 does not hold")
        return self._add(x, Activation(entry.name, slope), in_place=in_place)

    def _batch_norm(self, x: Tensor, module: nn.BatchNorm1d, path: str) -> Tensor:
        tracks = module.running_mean is not None
        if tracks != module.track_running_stats:
            raise NotAnMlpError(f"layer {path!r} has running statistics, but they are switched off")
        if module.training != self.model.training:
            raise NotAnMlpError(f"layer {path!r} is in another mode (training or evaluation) than the model")
        features = int(module.num_features)
        require_shapes(path, module.weight, module.bias, (features,), (features,))
        self._require_width(x, features)
        self._use(path, *self._tensors(module))
        momentum = None if module.momentum is None else float(module.momentum)
        return self._add(x, BatchNorm(path, features, float(module.eps), momentum, module.affine, tracks))

    def _layer_norm(self, x: Tensor, module: nn.LayerNorm, path: str) -> Tensor:
        if len(module.normalized_shape) != 1:
            raise NotAnMlpError(f"layer {path!r} normalises over several dimensions")
        if getattr(module, "dropout", 0):  # of `ol.nn.LayerNorm`
            raise NotAnMlpError(f"layer {path!r} drops elements of its input")
        features = int(module.normalized_shape[0])
        require_shapes(path, module.weight, module.bias, (features,), (features,))
        self._require_width(x, features)
        self._use(*self._tensors(module))
        scale, shift = module.weight is not None, module.bias is not None
        return self._add(x, LayerNorm(path, features, float(module.eps), scale, shift))

    def _tensors(self, module: nn.Module) -> list[str]:
        tensors = [*module._parameters.values(), *module._buffers.values()]
        return [self.names[id(tensor)] for tensor in tensors if tensor is not None and id(tensor) in self.names]

    def _require_width(self, x: Tensor, features: int) -> None:
        if x.ndim != 2 or x.shape[1] != features:
            outputs = " x ".join(map(str, x.shape[1:]))
            raise MisfitError(f"a layer of {features} inputs follows one of {outputs} outputs")


class MisfitError(NotAnMlpError):
    """Rows of this shape do not fit a layer."""


def require_shapes(
    path: str, weight: Tensor | None, bias: Tensor | None, weight_shape: tuple[int, ...], bias_shape: tuple[int, ...]
) -> None:
    """Refuse a parameter that the user has replaced by one of another shape than the module's attributes say."""
    for name, tensor, expected in (("weight", weight, weight_shape), ("bias", bias, bias_shape)):
        if tensor is not None and (tuple(tensor.shape) != expected or 0 in expected):
            raise NotAnMlpError(f"{name} of layer {path!r} has shape {tuple(tensor.shape)}, not {expected} or is empty")
