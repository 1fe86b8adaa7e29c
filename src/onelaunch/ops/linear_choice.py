"""Which implementation of linear + activation + dropout runs: the one that was fastest on this chip for this shape.

The candidates of a shape class are timed once, as CUDA graphs (so that launch cost does not mislead), and the result is kept in
a file under the user's cache directory, by chip and by the versions of torch and Triton. While a graph is being captured
nothing can be measured: the library GEMM and one pass stand in.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onelaunch.files import cache_folder, write_atomic
from onelaunch.graph_times import graph_times
from onelaunch.kernels.dropout_key import DropoutKey
from onelaunch.ops.arguments import kernels

CANDIDATES = 5  # the times on disk are those of these kernels and tiles; a change of either needs another number
MOST_COPIES = 64  # of operands, that they come from memory
# By which a library must be faster than a kernel of ours. 8192 x 4096 x 4096 with relu on an H200: 358 us cuBLASLt, 359 ours
# when timed in turns; in long runs, at the chip's limit of power, 425 and 411.
LIBRARY_LEAD = 1.02


class Call(NamedTuple):
    """One call of the op: inputs, outputs to fill, and what to compute."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    y: Tensor
    z: Tensor | None
    keep: Tensor | None
    activation: str | None
    p: float
    key: DropoutKey


class Implementation(NamedTuple):
    name: str
    run: Callable[[Call], None]


def _allows_tf32(x: Tensor) -> bool:
    return x.dtype == torch.float32 and torch._C._get_cublas_allow_tf32()  # what torch.backends asks, by a longer way


def run_library(call: Call) -> None:
    """cuBLAS, then one pass over its result, which adds the bias too (a bare product is a little faster)."""
    z, bias = call.y if call.z is None else call.z, call.bias
    if call.z is None or bias is None:
        torch.mm(call.x, call.weight.t(), out=z)
    else:
        torch.addmm(bias, call.x, call.weight.t(), out=z)
        bias = None
    kernels("activation_dropout").activation_dropout_forward(
        z, bias, call.y, call.keep, activation=call.activation, p=call.p, key=call.key
    )


def run_epilogue(call: Call) -> None:
    """cuBLASLt with bias and activation in its epilogue; relu and tanh-gelu only."""
    gelu = call.activation == "gelu_tanh"
    assert call.bias is not None
    torch._addmm_activation(call.bias, call.x, call.weight.t(), use_gelu=gelu, out=call.y)


LIBRARY = Implementation("library + pass", run_library)
EPILOGUE = Implementation("cuBLASLt epilogue", run_epilogue)


def fused(*tile: Any) -> Implementation:
    """A Triton GEMM with this tile (m, n, k, warps, stages[, tma])."""
    linear_kernels = kernels("linear")
    shape = linear_kernels.TileShape(*tile)

    def run(call: Call) -> None:
        linear_kernels.linear_forward(
            call.x, call.weight, call.bias, call.y, call.z, call.keep, activation=call.activation, p=call.p,
            key=call.key, tile=shape, tf32=_allows_tf32(call.x),
            overlap=call.keep is None,  # else the kernel before it may be one that draws the key, which lets nobody come early
        )  # fmt: skip

    return Implementation(str(shape), run)


def hopper(tile: Any) -> Implementation:
    """The CUDA C++ GEMM whose activation hides behind the next tile's products; no dropout."""
    module = kernels("linear_hopper")

    def run(call: Call) -> None:
        module.linear_forward(*call[:5], activation=call.activation, tile=tile)

    return Implementation(str(tile), run)


def hopper_tiles(call: Call) -> list[Any]:
    """Those of its tiles that may win.

    Of an H200's 132 multiprocessors, 2**18 outputs give 32 a small tile, 2**20 give 64 a medium one, 3 * 2**20 give 96 a large
    one (1.19 of the bare GEMM's time at 2**22, where medium ones take 1.15; 0.97 and 0.99 at 2**24). Narrow outputs fill no
    wide tile.
    """
    module, n = kernels("linear_hopper"), call.y.shape[1]
    outputs = shape_class(call.y.shape[0]) * n
    tiles = [module.SMALL] if outputs >= 2**18 and (outputs < 2**22 or n <= 256) else []
    tiles += [module.MEDIUM] if outputs >= 2**20 and n > 64 else []
    tiles += [module.LARGE] if outputs >= 3 * 2**20 and n > 128 else []
    return [tile for tile in tiles if call.keep is None and module.can_run(*call[:5], call.activation, tile)]


def candidates(call: Call) -> list[Implementation]:
    """What is worth timing for a shape: small outputs want small tiles (to fill the chip), large ones large tiles."""
    m, n = shape_class(call.y.shape[0]), call.y.shape[1]  # by class, as choices are kept
    found = [LIBRARY]
    plain = call.keep is None and call.z is None and call.bias is not None
    if plain and call.activation in ("relu", "gelu_tanh"):
        found.append(EPILOGUE)
    if call.x.dtype == torch.float32 and not _allows_tf32(call.x):
        # Triton's exact fp32 product runs without tensor cores: it beats cuBLAS only where one launch beats two.
        if m * n <= 32 * 1024 and call.x.shape[1] <= 512:
            found += [fused(16, 16, 64, 2, 3), fused(32, 32, 64, 4, 2)]
        return found
    tma = kernels("linear").can_use_tma(call.x, call.weight, call.y)
    found += [hopper(tile) for tile in hopper_tiles(call)]
    if m * n <= 256 * 1024:  # few tiles: latency decides, so all of a short k is in flight at once
        found += [fused(16, 16, 256, 4, 4), fused(32, 32, 128, 4, 4), fused(32, 64, 64, 4, 4), fused(64, 64, 64, 4, 4)]
        if call.x.shape[1] <= 1024 and call.x.element_size() == 2:
            found += [fused(16, 8, 1024, 2, 1), fused(16, 16, 1024, 4, 1), fused(16, 32, 1024, 4, 1)]
        if tma:
            found += [fused(64, 16, 128, 4, 7, True), fused(64, 16, 256, 4, 4, True), fused(64, 32, 128, 4, 6, True)]
    elif m * n <= 4 * 2**20:
        found += [fused(64, 128, 64, 4, 4), fused(128, 128, 64, 8, 3)]
        if tma:
            found += [fused(64, 128, 128, 4, 4, True), fused(128, 64, 128, 4, 4, True), fused(64, 128, 64, 4, 4, True)]
    else:
        found += [fused(128, 128, 64, 8, 3)]
        if tma:
            found += [
                fused(128, 256, 64, 8, 3, True),
                fused(128, 128, 64, 8, 4, True),
                fused(128, 128, 64, 4, 3, True, 2),
            ]
    return found


def rotated(call: Call, cache_bytes: int) -> list[Call]:
    """The call over copies of its operands, so many that none is still in a cache of that size when its turn comes again:
    between two uses of a layer's weights a model uses all others. The call alone where there is no room for copies."""
    enough = cache_bytes * 3 // 2 // (call.x.nbytes + call.weight.nbytes) + 1
    affordable = cache_bytes * 4 // (_span(call.x) + _span(call.weight)) + 1  # of narrow parts of wide matrices, say
    copies = min(MOST_COPIES, enough, affordable)
    if (call.x.data_ptr() | call.weight.data_ptr()) % 16:  # copies would lie better
        copies = 1
    try:
        return [call, *(call._replace(x=_copy(call.x), weight=_copy(call.weight)) for _ in range(copies - 1))]
    except torch.OutOfMemoryError:
        return [call]


def _span(tensor: Tensor) -> int:
    """Bytes from its first element to its last: what a copy that lies as it does takes."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.element_size()


def _copy(tensor: Tensor) -> Tensor:
    """With the same strides: not all implementations take all."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor.detach())


def measure(implementations: list[Implementation], call: Call) -> dict[str, float]:
    """Least GPU seconds of one call of each, over operands that come from memory."""
    calls = rotated(call, torch.cuda.get_device_properties(call.x.device).L2_cache_size)

    def on_call(implementation: Implementation) -> Callable[[int], object]:
        return lambda number: implementation.run(calls[number % len(calls)])

    return graph_times({one.name: on_call(one) for one in implementations})


class Table:
    """The measured choices of one chip and one set of versions, in memory and in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.choices = self._read()

    def _read(self) -> dict[str, Any]:
        try:
            content = json.loads(self.path.read_text())
            return content if isinstance(content, dict) else {}
        except (OSError, ValueError, RecursionError):
            return {}  # none yet, or damaged: measured again

    def times(self, key: str) -> dict[str, float]:
        """Of each implementation, infinite for one that cannot run; none where they are not known, or damaged."""
        found = self.choices.get(key)
        if not isinstance(found, dict) or not all(isinstance(time, float) and time > 0 for time in found.values()):
            return {}
        return found if any(time < math.inf for time in found.values()) else {}

    def add(self, key: str, times: dict[str, float]) -> None:
        self.choices = {**self._read(), **self.choices, key: times}
        with contextlib.suppress(OSError):  # a read-only home costs a measurement a process, nothing else
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self.path, json.dumps(self.choices, indent=1))


_tables: dict[int, Table] = {}
_chosen: dict[tuple[Any, ...], Implementation] = {}
_forced: list[Implementation] = []


def table(device: int) -> Table:
    if device not in _tables:
        import triton

        chip = torch.cuda.get_device_name(device).replace(" ", "-").replace("/", "-")
        name = f"linear-v{CANDIDATES}-{chip}-torch{torch.__version__}-triton{triton.__version__}.json"
        _tables[device] = Table(cache_folder("linear") / name)
    return _tables[device]


def shape_class(m: int) -> int:
    """Batches are classed by powers of two from 16."""
    return max(16, 1 << (m - 1).bit_length())


def choose(call: Call) -> Implementation:
    """The implementation for this call; measured if its class is new and the stream is not capturing."""
    if _forced:
        return _forced[-1]
    x, weight, bias = call.x, call.weight, call.bias
    m, k = x.shape
    device = x.device.index
    pointers = x.data_ptr() | weight.data_ptr() | (0 if bias is None else bias.data_ptr())
    aligned = pointers % 16 == 0 and x.stride(0) >= k <= weight.stride(0)  # for the copy engine
    key = (
        device, x.dtype, shape_class(m), weight.shape[0], k, call.activation, call.keep is not None,
        call.z is not None, bias is not None, _allows_tf32(x), x.stride(0) % 8, weight.stride(0) % 8, aligned,
    )  # fmt: skip
    known = _chosen.get(key)
    if known is not None:
        return known
    name = " ".join(str(part) for part in key[1:])
    times = table(device).times(name)
    capturing_now = torch.cuda.is_current_stream_capturing()
    if capturing_now and not times:
        return LIBRARY
    options = candidates(call)
    if any(option.name not in times for option in options):  # none yet, or of a time when not all could run
        if capturing_now:
            return LIBRARY
        with torch.cuda.device(device):
            times = measure(options, call)
        table(device).add(name, times)
    by_name = {option.name: option for option in options}
    _chosen[key] = by_name[fastest({name: times[name] for name in by_name})]
    return _chosen[key]


def fastest(times: dict[str, float]) -> str:
    """The name of the implementation to take."""
    libraries = (LIBRARY.name, EPILOGUE.name)
    return min(times, key=lambda name: times[name] * (LIBRARY_LEAD if name in libraries else 1))


@contextlib.contextmanager
def force(implementation: Implementation) -> Iterator[None]:
    """Every call inside runs this implementation, whatever was measured."""
    _forced.append(implementation)
    try:
        yield
    finally:
        _forced.pop()
