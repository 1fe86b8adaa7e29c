"""`parse_network`: the network that a module computes, however it is written, or the reason why it is not one.

The module's own forward is recorded (recorder.py) in training and in evaluation mode, on batches of different sizes. All
passes must agree, and none may leave a trace: a forward that depends on the batch size, draws random numbers on the host or
changes the module's attributes is refused, and the module's attributes are restored.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as every_module

from onelaunch.errors import abbreviate_list
from onelaunch.fuse.fuse import FusedCall
from onelaunch.rng import numpy_random_state
from onelaunch.run.known_functions import KNOWN_MODULES
from onelaunch.run.network import Network, NotAnMlpError, without_dropout
from onelaunch.run.recorder import MisfitError, Recorder, require_shapes
from onelaunch.trial_runs import kept_modes

GLOBAL_HOOKS = (  # of `register_module_forward_hook` and its siblings
    every_module._global_forward_hooks, every_module._global_forward_pre_hooks, every_module._global_backward_hooks,
    every_module._global_backward_pre_hooks,
)  # fmt: skip
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
TRIAL_ROWS = (3, 2)
ATTEMPTS = 4  # to find the generators as they were before: another thread may use them meanwhile
REPLACED = frozenset({"forward", "training", "_call_impl", "_compiled_call_impl"})


def parse_network(
    model: nn.Module, row_shape: Sequence[int] | None = None, batches: Sequence[int] = TRIAL_ROWS
) -> Network:
    """The layers of `model` for rows of shape `row_shape` (None: vectors that fit the first Linear).

    `batches` are the numbers of rows on which forward is tried. Raises NotAnMlpError with the reason, which names every
    layer that is in the way, and MisfitError where only the shape of the rows is wrong.
    """
    for path, module in model.named_modules():
        _refuse_extras(path, module)
    names = _tensor_names(model)
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not linears:
        raise NotAnMlpError(_in_the_way(model) or "the model has no Linear layer")
    for path, module in model.named_modules():
        if type(module) is nn.Linear:
            outputs, inputs = module.out_features, module.in_features
            require_shapes(path, module.weight, module.bias, (outputs, inputs), (outputs,))
    shape = (int(linears[0].in_features),) if row_shape is None else tuple(row_shape)
    try:
        network, used = _agreed(model, names, shape, batches)
    except MisfitError:
        raise
    except NotAnMlpError as error:
        raise NotAnMlpError(_in_the_way(model) or str(error)) from error
    _refuse_tensors(model, set(used))
    return network


def _agreed(
    model: nn.Module, names: dict[int, str], shape: tuple[int, ...], batches: Sequence[int]
) -> tuple[Network, list[str]]:
    """The network that every pass records, and the names of the tensors it uses."""
    recorder = Recorder(model, names, next(model.parameters()).device)
    for _ in range(ATTEMPTS):
        generators = _generators()
        network = _recorded_alike(model, recorder, shape, batches)
        if _generators() == generators:
            return network, recorder.used
    raise NotAnMlpError("forward draws random numbers on the host")


def _recorded_alike(model: nn.Module, recorder: Recorder, shape: tuple[int, ...], batches: Sequence[int]) -> Network:
    first: Network | None = None
    with kept_modes(model), _recorded(model, recorder):
        for training in (True, False):
            model.train(training)
            for rows in batches:
                network = recorder.record(rows, shape)
                first = first or network
                if network != (first if training else Network(without_dropout(first.layers))):
                    raise NotAnMlpError(
                        "forward depends on the number of rows, or computes something else in evaluation"
                    )
    assert first is not None
    return first


def _generators() -> tuple[Any, ...]:
    """The states of Python's and NumPy's generators, and the seed of PyTorch's, whose draws the recorder sees itself."""
    return random.getstate(), numpy_random_state(), torch.initial_seed()


@contextlib.contextmanager
def _recorded(model: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Replace the forward of known modules and bypass compiled calls; afterwards restore all attributes of all modules."""
    before = [(path, vars(module), dict(vars(module))) for path, module in model.named_modules()]
    sizes = [[len(value) for value in saved.values() if isinstance(value, list | dict | set)] for _, _, saved in before]
    for path, module in model.named_modules():
        if type(module) in KNOWN_MODULES:
            module.forward = recorder.leaf_forward(module, path)
        elif _is_foreign(module):
            module.forward = _refusing_forward(path, module)
        vars(module).pop("_call_impl", None)
        vars(module).pop("_compiled_call_impl", None)
    changed = ""
    try:
        yield
        for (path, now, saved), lengths in zip(before, sizes, strict=True):
            same = now.keys() - REPLACED == saved.keys() - REPLACED
            same = same and all(now[name] is saved[name] for name in saved.keys() - REPLACED)
            if not same or lengths != [len(value) for value in saved.values() if isinstance(value, list | dict | set)]:
                changed = path or "the model"
    finally:
        for _, now, saved in before:
            now.clear()
            now.update(saved)
    if changed:
        raise NotAnMlpError(f"forward changes the attributes of {changed!r}")


def _is_foreign(module: nn.Module) -> bool:
    """Whether a module is one of PyTorch's or ours that no native engine has. A user's class is judged by its forward."""
    name = type(module).__module__
    known = type(module) in KNOWN_MODULES or type(module) in CONTAINERS
    return not known and name.startswith(("torch.nn.", "torch.ao.", "onelaunch.nn"))


def _refusing_forward(path: str, module: nn.Module) -> Any:
    def forward(*args: Any, **kwargs: Any) -> Any:
        raise NotAnMlpError(f"the native engines do not have {_named(path, module)}")

    return forward


def _named(path: str, module: nn.Module) -> str:
    return f"{path or 'the model'} ({type(module).__name__})"


def _in_the_way(model: nn.Module) -> str:
    """All modules that no native engine has, in one line; empty when there are none."""
    foreign: list[str] = []
    inside = ""
    for path, module in model.named_modules():
        if _is_foreign(module) and not (inside and path.startswith(inside)):
            inside = f"{path}."  # the parts of a TransformerEncoderLayer need not be named
            foreign.append(_named(path, module))
    return f"the native engines do not have {abbreviate_list(foreign)}" if foreign else ""


def _tensor_names(model: nn.Module) -> dict[int, str]:
    """The name of each parameter and buffer of the state_dict, by id. Raises NotAnMlpError where two share their memory."""
    places: list[tuple[int, int, str]] = []  # first address, end, name
    buffers = model.named_buffers(remove_duplicate=False)
    names = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *buffers]:
        if nn.parameter.is_lazy(tensor):
            raise NotAnMlpError(f"{name} is not initialised yet")
        if tensor.layout is not torch.strided:
            raise NotAnMlpError(f"{name} is sparse")
        names[id(tensor)] = name
        if tensor.numel():
            reach = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
            places.append((tensor.data_ptr(), tensor.data_ptr() + reach * tensor.element_size(), name))
    for (_, end, name), (begin, _, other) in pairwise(sorted(places)):
        if begin < end:
            raise NotAnMlpError(f"{name} and {other} share their memory")
    state = model.state_dict(keep_vars=True)
    if any(id(tensor) not in names or names[id(tensor)] != name for name, tensor in state.items()):
        raise NotAnMlpError("the model's state_dict has other tensors than its parameters and buffers")
    return names


def _refuse_tensors(model: nn.Module, used: set[str]) -> None:
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and tensor.dtype != torch.float32:
            raise NotAnMlpError(f"{name} is {tensor.dtype}, not torch.float32")
        if isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
            raise NotAnMlpError(f"{name} is frozen (requires_grad=False)")
        if isinstance(tensor, nn.Parameter) and name not in used:
            raise NotAnMlpError(f"forward does not use {name}")


def _refuse_extras(path: str, module: nn.Module) -> None:
    """Refuse hooks and the like, which an engine that does not call the module would skip."""
    hooks = (
        module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks,
        module._state_dict_hooks, module._state_dict_pre_hooks, module._load_state_dict_pre_hooks,
    )  # fmt: skip
    own_call = not isinstance(vars(module).get("_call_impl"), FusedCall | None)
    own_forward = "forward" in vars(module) or own_call or isinstance(module, torch.jit.ScriptModule)
    if any(hooks) or own_forward or hasattr(module, "parametrizations"):
        raise NotAnMlpError(f"layer {path or 'the model itself'!r} has a hook, a parametrization or its own forward")
    for name, parameter in module._parameters.items():
        if parameter is not None and (parameter._backward_hooks or parameter._post_accumulate_grad_hooks):
            raise NotAnMlpError(f"{name} of layer {path!r} has a hook")
    if any(GLOBAL_HOOKS):
        raise NotAnMlpError("a hook on all modules is registered")
