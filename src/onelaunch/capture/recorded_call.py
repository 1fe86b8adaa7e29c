"""A function of tensors without gradients, recorded as a CUDA graph and replayed: one launch per call.

The function is one that Dynamo has compiled and guards: a change of modes, attributes, shapes or autocast selects another
function, which has recordings of its own. Parameters and buffers are read where they are, so updates in place count. Other
inputs are copied into the recording's memory, and results out of it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from onelaunch.capture.graph import capturing
from onelaunch.errors import first_line

log = logging.getLogger("onelaunch")
MAX_RECORDINGS = 8  # per compiled graph: of other shapes, or with parameters at other addresses


class Recording(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: list[torch.Tensor]  # copies, which the graph reads
    outputs: list[Any]
    numbers: list[Any]  # the values of arguments that are numbers, such as sizes
    addresses: list[int]  # of parameters and buffers

    def fits(self, inputs: list[torch.Tensor], numbers: list[Any]) -> bool:
        pairs = zip(self.inputs, inputs, strict=True)
        return self.numbers == numbers and all(a.shape == b.shape and a.stride() == b.stride() for a, b in pairs)


class RecordedCall:
    """Calls `function`, from the second call on as a recording. `reason` says why it cannot be recorded; else it is empty."""

    def __init__(self, function: Callable[..., Sequence[Any]], reason: str = "") -> None:
        self.function, self.reason = function, reason
        self._recordings: list[Recording] = []
        self._called = False
        self._fixed: list[int] = []  # positions of parameters and buffers among the arguments
        self._copied: list[int] = []  # of other tensors
        self._numbers: list[int] = []  # of numbers
        self._device = torch.device("cuda")
        self._lock = threading.Lock()
        self._stream: torch.cuda.Stream | None = None  # of the last replay
        self._pool: Any = None

    def __call__(self, *args: Any) -> Sequence[Any]:
        if self.reason or torch.cuda.is_current_stream_capturing():  # then the caller records
            return self.function(*args)
        with self._lock:  # threads share the recording's memory
            if not self._called:
                return self._first_call(args)
            inputs, numbers = [args[i] for i in self._copied], [_number(args[i]) for i in self._numbers]
            addresses = list(map(torch.Tensor.data_ptr, map(args.__getitem__, self._fixed)))
            for recording in self._recordings:
                if recording.addresses == addresses and recording.fits(inputs, numbers):
                    return self._replay(recording, inputs)
            made = self._record(args, inputs, numbers, addresses)
            return self.function(*args) if made is None else self._replay(made, inputs)

    def _first_call(self, args: tuple[Any, ...]) -> Sequence[Any]:
        """An ordinary call, in which libraries and kernels prepare themselves, and which shows what the function does."""
        tensors = [i for i, arg in enumerate(args) if not is_number(arg)]
        self._fixed = [i for i in tensors if is_fixed(args[i])]
        self._copied = [i for i in tensors if not is_fixed(args[i])]
        self._numbers = [i for i in range(len(args)) if i not in tensors]
        before = [args[i].clone() for i in self._copied]
        outputs = self.function(*args)
        changed = any(not _same(old, args[i]) for old, i in zip(before, self._copied, strict=True))
        self.reason = unrecordable_reason(args, outputs, changed)
        if self.reason:
            log.debug("fuse: a graph is not recorded: %s", self.reason)
        else:
            self._device = args[tensors[0]].device
        self._called = True
        return outputs

    def _record(
        self, args: tuple[Any, ...], inputs: list[Any], numbers: list[Any], addresses: list[int]
    ) -> Recording | None:
        if len(self._recordings) == MAX_RECORDINGS:
            self._stop(f"it was called with more than {MAX_RECORDINGS} shapes or places of its parameters")
            return None
        given = list(args)
        try:
            with torch.cuda.device(self._device):
                with torch.inference_mode(False), torch.no_grad():  # so that later calls in any mode may write to them
                    copies = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in inputs]
                for i, copy in zip(self._copied, copies, strict=True):
                    given[i] = copy.copy_(args[i])
                torch.cuda.synchronize()  # a replay on another stream may still use the pool
                self._pool = self._pool or torch.cuda.graph_pool_handle()
                graph = torch.cuda.CUDAGraph()
                with capturing(graph, pool=self._pool):
                    outputs = list(self.function(*given))
        except Exception as error:  # whatever a recording forbids
            torch.cuda.synchronize(self._device)
            self._stop(first_line(error))
            return None
        self._recordings.append(Recording(graph, copies, outputs, numbers, addresses))
        return self._recordings[-1]

    def _replay(self, recording: Recording, inputs: list[torch.Tensor]) -> tuple[Any, ...]:
        stream = torch.cuda.current_stream(self._device)
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)
        self._stream = stream
        for copy, given in zip(recording.inputs, inputs, strict=True):
            copy.copy_(given)
        recording.graph.replay()
        return tuple(one.clone() if isinstance(one, torch.Tensor) else one for one in recording.outputs)

    def _stop(self, reason: str) -> None:
        self.reason = reason
        self._recordings.clear()
        log.warning("fuse: a graph is no longer run as a CUDA graph: %s", reason)


def is_fixed(tensor: torch.Tensor) -> bool:
    """Whether it is a parameter or buffer, which Dynamo marks: it stays where it is from call to call."""
    return isinstance(tensor, torch.nn.Parameter) or hasattr(tensor, "_dynamo_static_input_type")


def is_number(argument: Any) -> bool:
    """Whether it is not a tensor, or one that stands for a number, as Dynamo passes a float that has changed between calls."""
    return not isinstance(argument, torch.Tensor) or (argument.device.type == "cpu" and not argument.dim())


def _number(argument: Any) -> Any:
    return argument.item() if isinstance(argument, torch.Tensor) else argument


def unrecordable_reason(args: Sequence[Any], outputs: Any, changed: bool) -> str:
    """Why a replay would differ from a call with these arguments and results; empty where it would not.

    changed: whether the call changed an input that is neither a parameter nor a buffer.
    """
    tensors = [arg for arg in args if not is_number(arg)]
    if not all(isinstance(arg, torch.Tensor | int | float) for arg in args):
        return "it has arguments that are neither tensors nor numbers"
    if not tensors or not all(tensor.is_cuda and tensor.device == tensors[0].device for tensor in tensors):
        return "its tensors are not all on one CUDA device"
    if changed:
        return "it changes an input in place"
    results = [one for one in outputs if isinstance(one, torch.Tensor)]
    if any(one.requires_grad for one in results):
        return "its results have gradients"
    if not all(one.is_cuda for one in results):
        return "it returns a tensor on the CPU"
    memory = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    places = sorted(one.untyped_storage().data_ptr() for one in results if one.numel())
    if memory & set(places) or any(a == b for a, b in pairwise(places)):
        return "a result is a view of an input or of another result"
    return ""


def _same(before: torch.Tensor, after: torch.Tensor) -> bool:
    """Bit for bit: NaN equals itself."""
    if before.dtype.is_complex:
        before, after = torch.view_as_real(before), torch.view_as_real(after)
    return bool(torch.eq(before, after).logical_or(before.isnan() & after.isnan()).all())
