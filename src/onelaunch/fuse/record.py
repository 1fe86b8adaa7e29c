"""Runs a model once and notes every operation with its sizes, inside the graphs of regions and outside.

The model runs for real, so that any model can be recorded; what that changes of it is put back afterwards.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakIdKeyDictionary

from onelaunch.errors import OnelaunchError
from onelaunch.fuse.aliases import label
from onelaunch.fuse.arguments import inputs_of
from onelaunch.fuse.chains import Chain
from onelaunch.fuse.costs import NOTHING, Spec, Step, apart
from onelaunch.fuse.operations import Operation, of_call
from onelaunch.fuse.put_back import attributes_put_back, buffers_put_back, tensors_put_back
from onelaunch.fuse.region import Plan, Region, absolute, watched_by
from onelaunch.fuse.roofline import Cost
from onelaunch.fuse.spelled import spelled_activation
from onelaunch.fuse.tracing import said_by


@dataclass
class Found:
    """A chain met while recording, with the operations it stands for and where they are in the record."""

    chain: Chain
    region: Region
    training: bool
    steps: list[int] = field(default_factory=list)  # indices into the record; none if the run did not pass it


@dataclass
class Record:
    steps: list[Step] = field(default_factory=list)
    chains: list[Found] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    written: list[torch.Tensor] = field(default_factory=list)  # beside buffers


def record(model: nn.Module, inputs: tuple[Any, ...], named_inputs: dict[str, Any] | None = None) -> Record:
    """One call of `model` in its current mode; in training mode what it would cost to go back is part of the record."""
    given = inputs, named_inputs or {}
    by_position, by_name = tree_map(
        lambda x: x.detach().clone().requires_grad_(x.requires_grad) if _is_tensor(x) else x, given
    )
    cuda = [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    recorder = _Recorder(model)
    try:
        with (
            buffers_put_back(model), attributes_put_back(model), torch.random.fork_rng(devices=cuda),
            torch.set_grad_enabled(model.training), tensors_put_back(model) as written,
            recorder.watching(), warnings.catch_warnings(),
        ):  # fmt: skip
            warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are global hooks")  # ours
            model(*by_position, **by_name)
    except Exception as error:
        said = said_by(error, sentence=False).rstrip(": ")
        raise OnelaunchError(f"inputs do not fit {type(model).__name__}: {said}; pass what it takes") from error
    if written:
        recorder.record.notes.append(f"the forward writes to {next(iter(written))}: what this run wrote is put back")
    recorder.record.written = list(written.values())
    return recorder.record


def _counts_batches(func: Any, result: torch.Tensor) -> bool:
    """A batch norm's count of its batches: one of the launches that `costs` gives a batch norm."""
    return func is torch.Tensor.add_ and result.dtype == torch.int64 and result.dim() == 0


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


class _Recorder(TorchFunctionMode):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.record = Record()
        self.names = {id(module): path for path, module in model.named_modules()}
        self.open: list[str] = []  # paths of the modules being called
        self.place: str | None = None  # of the node being run, where a region is
        self.makers = WeakIdKeyDictionary()  # tensor -> the step that made it

    @contextmanager
    def watching(self) -> Iterator[None]:
        def enter(module: nn.Module, _: Any) -> None:
            self.open.append(self.names.get(id(module), type(module).__name__))

        def leave(*_: Any) -> None:
            self.open.pop()

        hooks = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]
        try:
            with watched_by(self.run_region), self:
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def run_region(self, region: Region, plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The region's graph node by node, unfused."""
        assert plan.trace is not None
        return _Walk(self, region, plan).run(*inputs_of(args, kwargs))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operation = of_call(func, args, kwargs)
        if operation is not None and _is_tensor(operation.input):
            result = func(*args, **kwargs)
            self._note(step_of(operation, result), (args, kwargs), result)
            return result
        counter = _Counter()
        with counter:
            result = func(*args, **kwargs)
        outputs = [x for x in tree_leaves(result) if _is_tensor(x)]
        if func is F.scaled_dot_product_attention and not outputs[0].is_cuda:
            counter.cost = _attention(args, kwargs, outputs[0])
        if counter.cost.launches and outputs and not _counts_batches(func, outputs[0]):
            name = getattr(func, "__name__", str(func)).strip("_")
            read = [Spec.of(x) for x in tree_leaves((args, kwargs)) if _is_tensor(x)]
            step = Step(name, name, name, read, Spec.of(outputs[0]), forward=counter.cost)
            if step.output.requires_grad:
                forward = counter.cost
                twice = 2 if forward.flops else 1
                step.backward = Cost(twice * forward.bytes, twice * forward.flops, twice * forward.launches)
            self._note(step, (args, kwargs), result)
        else:
            self._pass_on((args, kwargs), result)
        return result

    def _note(self, step: Step, read: Any, result: Any) -> None:
        place = self.place or (self.open[-1] if self.open else "")
        step.label = place or step.name
        step.sources = self._makers_of(read)
        for tensor in filter(_is_tensor, tree_leaves(result)):
            self.makers[tensor] = len(self.record.steps)
        self.record.steps.append(step)

    def merge(self, first: int, name: str) -> None:
        """The steps from `first` on are one activation, written out."""
        steps = self.record.steps[first:]
        if not steps:
            return
        whole = replace(
            steps[-1], role="activation", name=name, inputs=steps[0].inputs[:1],
            forward=sum((step.forward for step in steps), NOTHING),
            backward=sum((step.backward for step in steps), NOTHING),
            sources=tuple(sorted({at for step in steps for at in step.sources if at < first})),
        )  # fmt: skip
        self.record.steps[first:] = [whole]
        for tensor, maker in list(self.makers.items()):
            if maker > first:
                self.makers[tensor] = first

    def _pass_on(self, read: Any, result: Any) -> None:
        """A view comes from where its tensor comes from."""
        makers = self._makers_of(read)
        for tensor in filter(_is_tensor, tree_leaves(result)):
            if makers and tensor not in self.makers:
                self.makers[tensor] = makers[-1]

    def _makers_of(self, read: Any) -> tuple[int, ...]:
        found = [self.makers.get(tensor) for tensor in tree_leaves(read) if _is_tensor(tensor)]
        return tuple(sorted({maker for maker in found if maker is not None}))


class _Walk(fx.Interpreter):
    def __init__(self, recorder: _Recorder, region: Region, plan: Plan) -> None:
        assert plan.trace is not None
        super().__init__(region.module, graph=plan.trace.graph)
        self.extra_traceback = False  # which turns a KeyError into another
        self.recorder, self.region = recorder, region
        self.found = {id(chain): Found(chain, region, region.module.training) for chain in plan.chains}
        self.plan = plan
        recorder.record.chains += self.found.values()

    def run_node(self, n: fx.Node) -> Any:
        recorder = self.recorder
        outer, recorder.place = recorder.place, absolute(self.region.path, label(n))
        # A call of an opaque child names what it does by itself.
        opaque = n.op == "call_module" and self.fetch_attr(str(n.target))._modules
        if opaque:
            recorder.place = None
        first = len(recorder.record.steps)
        try:
            return super().run_node(n)
        finally:
            recorder.place = outer
            spelled = spelled_activation(self.fetch_attr(str(n.target))) if n.op == "call_module" else None
            if spelled is not None:
                recorder.merge(first, spelled)
            for chain in self.plan.chains:
                if n in chain.nodes:
                    role = chain.operations[chain.nodes.index(n)].role
                    new = range(first, len(recorder.record.steps))
                    self.found[id(chain)].steps += [at for at in new if recorder.record.steps[at].role == role]


def step_of(operation: Operation, result: torch.Tensor) -> Step:
    arguments = operation.arguments
    options: dict[str, float] = {"training": operation.option("training", operation.role == "dropout") is True}
    tensors = [operation.input]
    match operation.role:
        case "activation":
            options["inplace"] = operation.inplace
        case "linear":
            tensors += [t for t in (arguments.get("weight"), arguments.get("bias")) if t is not None]
            bias = arguments.get("bias")
            options["bias"] = bias is not None and bias.requires_grad
        case "dropout":
            options["dropped"] = operation.dropped
        case "cross_entropy":
            options["smoothing"] = arguments.get("label_smoothing", 0.0)
    inputs = [Spec.of(tensor) for tensor in tensors]
    step = Step(operation.role, operation.name, operation.name, inputs, Spec.of(result), options)
    work = apart(step)
    return replace(step, forward=work.forward, backward=work.backward)


def _attention(args: tuple[Any, ...], kwargs: dict[str, Any], out: torch.Tensor) -> Cost:
    """One kernel, as on a GPU; a CPU may take the products apart and keep every weight of the attention."""
    tensors = [x for x in tree_leaves((args, kwargs)) if _is_tensor(x)]
    named = dict(zip(("query", "key"), args, strict=False)) | kwargs
    products = named["query"].numel() // named["query"].shape[-1] * named["key"].shape[-2]
    flops = 2 * products * (named["query"].shape[-1] + out.shape[-1])
    return Cost(sum(x.numel() * x.element_size() for x in (*tensors, out)), flops, 1)


class _Counter(TorchDispatchMode):
    """Bytes, operations and launches of the kernels a call runs; a view or a shape question runs none."""

    def __init__(self) -> None:
        super().__init__()
        from torch.utils.flop_counter import flop_registry  # imports Triton where it is installed

        self.registry = flop_registry
        self.cost = Cost()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        outputs = [x for x in tree_leaves(result) if _is_tensor(x)]
        if outputs and not func.is_view and func.overloadpacket not in _FREE:
            tensors = [x for x in tree_leaves((args, kwargs)) if _is_tensor(x)]
            counted = self.registry.get(func.overloadpacket)
            flops = counted(*args, **(kwargs or {}), out_val=result) if counted else max(x.numel() for x in outputs)
            if func.overloadpacket is _aten.embedding:  # reads the rows it gives, not the whole table
                tensors = [outputs[0], *tensors[1:]]
            else:
                outputs = [x for x in outputs if all(x is not read for read in tensors)]
            moved = sum(x.numel() * x.element_size() for x in (*tensors, *outputs))
            self.cost += Cost(moved, flops, 1)
        return result


_aten = torch.ops.aten
_FREE = {
    _aten.detach,
    _aten.empty,
    _aten.empty_like,
    _aten._unsafe_view,
    _aten.lift_fresh,
    _aten.alias,
    _aten.empty_strided,
}
