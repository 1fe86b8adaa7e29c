"""Reading the graphs that Dynamo captures: which operation a node is, what follows it, and the tensors it works on."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from onelaunch.activations import ACTIVATIONS, LEAKY_RELU_SLOPE

_UNARY = ("input",)
_LOSS = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
_CONVOLUTION = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_NORM = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")

# function -> (operation, its parameters in order)
FUNCTIONS: dict[Any, tuple[str, tuple[str, ...]]] = {
    F.linear: ("linear", ("input", "weight", "bias")),
    F.conv2d: ("conv2d", _CONVOLUTION),
    F.batch_norm: ("batch_norm", _NORM),
    F.dropout: ("dropout", ("input", "p", "training", "inplace")),
    torch.dropout: ("dropout", ("input", "p", "training")),
    F.cross_entropy: ("cross_entropy", _LOSS),
    F.nll_loss: ("nll_loss", _LOSS[:-1]),
    F.log_softmax: ("log_softmax", ("input", "dim", "_stacklevel", "dtype")),
    torch.log_softmax: ("log_softmax", ("input", "dim", "dtype")),
    operator.add: ("add", ("input", "other")),
    operator.iadd: ("add", ("input", "other")),
    torch.add: ("add", ("input", "other", "alpha")),
    torch.relu_: ("relu", _UNARY),
} | {
    function: (entry.name, ("input", *entry.settings, "inplace"))
    for entry in reversed([*ACTIVATIONS.values()])  # so that F.gelu is "gelu", which `Operation.activation` tells apart
    for function in entry.functions
}
FUNCTIONS[F.leaky_relu] = ("leaky_relu", ("input", "negative_slope", "inplace"))
METHODS: dict[str, tuple[str, tuple[str, ...]]] = {
    **{name: (name.rstrip("_"), _UNARY) for name in ("relu", "relu_", "sigmoid", "sigmoid_", "tanh", "tanh_")},
    "log_softmax": ("log_softmax", ("input", "dim", "dtype")),
    "add": ("add", ("input", "other")),
    "add_": ("add", ("input", "other")),
}
_MEAN_LOSS = {"weight": None, "ignore_index": -100, "reduction": "mean", "label_smoothing": 0.0}
DEFAULTS: dict[str, dict[str, Any]] = {
    "linear": {"bias": None},
    "conv2d": {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1},
    "batch_norm": {"weight": None, "bias": None, "training": False, "momentum": 0.1, "eps": 1e-5},
    "dropout": {"p": 0.5, "training": True},
    **dict.fromkeys(("cross_entropy", "nll_loss"), _MEAN_LOSS),
    "log_softmax": {"dim": None, "dtype": None},
    "leaky_relu": {"negative_slope": LEAKY_RELU_SLOPE},
    **{entry.name: dict(entry.settings) for entry in ACTIVATIONS.values() if entry.settings},
}


@dataclass(frozen=True)
class Operation:
    """What a node computes, as far as the patterns care: a name and its arguments by parameter name."""

    name: str
    node: fx.Node
    arguments: dict[str, Any]

    @property
    def activation(self) -> str | None:
        """The key of ACTIVATIONS that this operation computes; None for another operation, or with other settings."""
        name = self.name
        if name == "gelu" and self.arguments["approximate"] == "tanh":
            name = "gelu_tanh"
        if name not in ACTIVATIONS:
            return None
        slope = {"negative_slope": LEAKY_RELU_SLOPE} if name == "leaky_relu" else {}
        required = {**ACTIVATIONS[name].settings, **slope}
        return name if all(self.arguments.get(key, value) == value for key, value in required.items()) else None

    @property
    def dropout(self) -> float | None:
        """The probability of a dropout (0 in evaluation); None for another operation, or where it is not a constant.

        Also None for 1, where PyTorch multiplies by 0: an infinity becomes NaN, and 0 in our ops.
        """
        p, training = self.arguments.get("p"), self.arguments.get("training")
        if self.name != "dropout" or not isinstance(p, int | float) or not isinstance(training, bool):
            return None
        return 0.0 if not training else None if p == 1 else float(p)


def name_of(node: fx.Node) -> str:
    """The name of the function or method that a node calls."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def value_of(node: fx.Node, values: dict[fx.Node, Any], is_allowed: Callable[[fx.Node], bool]) -> Any:
    """The value of `node`, computed with those of the nodes that it needs, which are added to `values`.

    Raises ValueError where it needs one that is not allowed, or what PyTorch raises.
    """
    waiting = [node]
    while waiting:
        one = waiting[-1]
        if one in values:
            waiting.pop()
            continue
        if not is_allowed(one):
            raise ValueError(one.name)
        if needed := [source for source in one.all_input_nodes if source not in values]:
            waiting += needed
            continue
        given = fx.node.map_arg((one.args, dict(one.kwargs)), values.__getitem__)
        args, kwargs = torch.utils._pytree.tree_map_only((torch.device, str), _without_device, given)
        function: Any = getattr(type(args[0]), name_of(one)) if one.op == "call_method" else one.target
        values[one] = function(*args, **kwargs)
    return values[node]


def _without_device(value: torch.device | str) -> torch.device | str:
    """The CPU for a device or its name; any other text as it is."""
    try:
        torch.device(value)
    except RuntimeError:
        return value
    return torch.device("cpu")


def operation_of(node: fx.Node) -> Operation | None:
    """The operation that `node` performs; None where no pattern knows it."""
    table: dict[Any, tuple[str, tuple[str, ...]]] = METHODS if node.op == "call_method" else FUNCTIONS
    if node.op not in ("call_method", "call_function") or node.target not in table:
        return None
    name, parameters = table[node.target]
    keywords = {"training" if key == "train" else key: value for key, value in node.kwargs.items()}
    if len(node.args) > len(parameters) or not set(keywords) <= set(parameters):
        return None
    given = {**dict(zip(parameters, node.args, strict=False)), **keywords}
    return Operation(name, node, {**DEFAULTS.get(name, {}), **given})


def are_constants(*values: Any) -> bool:
    """Whether these are numbers, or tuples of them, that are the same in every call; not symbols or tensors."""
    leaves = torch.utils._pytree.tree_leaves(values)
    return all(isinstance(leaf, int | float) for leaf in leaves)


def sole_user(node: fx.Node) -> fx.Node | None:
    """The node that uses the value of `node`, if it is the only one."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def next_operation(node: fx.Node) -> Operation | None:
    """The only operation that uses the value of `node`, if it takes it as its input."""
    user = sole_user(node)
    operation = operation_of(user) if user is not None else None
    return operation if operation is not None and operation.arguments.get("input") is node else None


def tensor_of(node: Any) -> torch.Tensor | None:
    """The fake tensor that a node had when it was captured; None for a nested one, whose rows no pattern knows, and for one of
    a class that computes in its own way, such as a quantised weight.
    """
    value = node.meta.get("example_value", node.meta.get("val")) if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor) or value.is_nested or is_traceable_wrapper_subclass(value):
        return None
    return value


def number_of_values(tensor: torch.Tensor) -> int:
    """Of the call that was captured: unlike a comparison of `numel()`, this does not tie the compiled graph to its sizes.

    0 where only the run knows it.
    """
    count = tensor.numel()
    if isinstance(count, torch.SymInt):
        return int(count.node.hint) if count.node.has_hint() else 0
    return count


def tensors_of(*nodes: Any) -> list[torch.Tensor]:
    """The fake tensors that these nodes are or return."""
    values = [node.meta.get("example_value") for node in nodes if isinstance(node, fx.Node)]
    leaves = [leaf for value in values for leaf in (value if isinstance(value, tuple | list) else (value,))]
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def is_layer(operation: Operation) -> bool:
    """Whether the weight is a matrix and the bias a vector of one number per output, as `ol.linear` takes them."""
    given = operation.arguments
    tensors = map(tensor_of, (given["input"], given["weight"], given["bias"], operation.node))
    x, weight, bias, output = tensors
    if x is None or weight is None or output is None or weight.dim() != 2 or output.dim() < 1 or output.is_complex():
        return False
    return given["bias"] is None or (bias is not None and bias.shape == output.shape[-1:])


def is_parameter_layer(operation: Operation) -> bool:
    """Whether this is a linear layer of parameters with constant sizes."""
    if operation.name != "linear" or not is_layer(operation):
        return False
    weight, bias = operation.arguments["weight"], operation.arguments["bias"]
    given = all(one is None or one.op in ("placeholder", "get_attr") for one in (weight, bias))
    return given and are_constants(*shape_of(weight))


def shape_of(node: fx.Node) -> torch.Size:
    """The shape of a node that stands for a tensor."""
    tensor = tensor_of(node)
    assert tensor is not None
    return tensor.shape


def is_checkpointed_block(node: fx.Node) -> bool:
    return node.target is torch.ops.higher_order.tag_activation_checkpoint


def module_of(node: fx.Node) -> str:
    """The path of the module whose forward made this node, such as `encoder.layers.0.linear1`; "" for the model itself."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    name = re.sub(r"^[LG]\['[^']*'\]", "", str(list(stack.values())[-1][0]))
    return re.sub(r"\.?_modules\['([^']*)'\]|\[(\d+)\]|\['([^']*)'\]", r".\1\2\3", name).strip(".")
