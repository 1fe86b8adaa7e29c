"""Which implementation of linear + activation + dropout runs: the one that was fastest on this chip for this shape.

The candidates of a shape class are timed once, as CUDA graphs (so that launch cost does not mislead), and the times are kept
on disk (see `measured_times`). While a CUDA graph is being captured nothing can be measured: an unknown shape then takes the
library GEMM and one elementwise pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onelaunch.integers import next_power_of_2
from onelaunch.kernels.dropout_key import DropoutKey
from onelaunch.measured_times import MeasuredTimes
from onelaunch.ops.arguments import kernels
from onelaunch.ops.graph_times import graph_times

TIMED_SOURCES = ("kernels", "nvrtc", "ops/linear_choice.py")  # a change of these makes the times on disk invalid
MAX_COPIES = 64  # of the operands of a timed call
# A library is taken only if it is faster by this factor. 8192 x 4096 x 4096 with relu on an H200, timed in turns: cuBLASLt
# 358 us, our kernel 359 us. In long runs, at the chip's power limit: 425 us and 411 us.
LIBRARY_LEAD = 1.02
FEW_OUTPUTS = 2**18  # up to here a GEMM has few tiles, and one launch instead of two counts


class Call(NamedTuple):
    """One call of the op: its inputs, the outputs to fill, and its options."""

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
    """A way to compute the op. Its name is also its key in the file of measured times."""

    name: str
    run: Callable[[Call], None]


def _allows_tf32(x: Tensor) -> bool:
    return (
        x.dtype == torch.float32 and torch._C._get_cublas_allow_tf32()
    )  # torch.backends reads the same flag, more slowly


def run_library(call: Call) -> None:
    """cuBLAS, then one pass over its result. The pass adds the bias where it can: a product without bias is a bit faster."""
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
    """cuBLASLt with bias and activation in its epilogue, for relu and gelu_tanh."""
    gelu = call.activation == "gelu_tanh"
    assert call.bias is not None
    torch._addmm_activation(call.bias, call.x, call.weight.t(), use_gelu=gelu, out=call.y)


LIBRARY = Implementation("library + pass", run_library)
EPILOGUE = Implementation("cuBLASLt epilogue", run_epilogue)


def triton_gemm(*tile: Any) -> Implementation:
    """A Triton GEMM with a fused epilogue; `tile` is (m, n, k, warps, stages[, tma[, programs per multiprocessor]])."""
    linear_kernels = kernels("linear")
    shape = linear_kernels.GemmTile(*tile)

    def run(call: Call) -> None:
        linear_kernels.linear_forward(
            call.x, call.weight, call.bias, call.y, call.z, call.keep, activation=call.activation, p=call.p,
            key=call.key, tile=shape, tf32=_allows_tf32(call.x),
            overlap=call.keep is None,  # else the previous kernel may draw the key, and it never allows an early start
        )  # fmt: skip

    return Implementation(str(shape), run)


def hopper_gemm(tile: Any) -> Implementation:
    """The CUDA C++ GEMM that overlaps a tile's epilogue with the next tile's products; it has no dropout."""
    module = kernels("linear_hopper")

    def run(call: Call) -> None:
        module.linear_forward(*call[:5], activation=call.activation, tile=tile)

    return Implementation(str(tile), run)


def hopper_tiles(call: Call) -> list[Any]:
    """The tiles of the CUDA C++ GEMM that may win for this call.

    2**18 outputs keep 32 of an H200's 132 multiprocessors busy with small tiles, 2**20 keep 64 busy with medium tiles, and
    3 * 2**20 keep 96 busy with large tiles. Relative to a GEMM without epilogue, large and medium tiles take 1.19 and 1.15 of
    its time at 2**22 outputs, 0.97 and 0.99 at 2**24. Narrow outputs do not fill a wide tile.
    """
    module, n = kernels("linear_hopper"), call.y.shape[1]
    outputs = shape_class(call.y.shape[0]) * n
    tiles = [module.SMALL] if outputs >= 2**18 and (outputs < 2**22 or n <= 256) else []
    tiles += [module.MEDIUM] if outputs >= 2**20 and n > 64 else []
    tiles += [module.LARGE] if outputs >= 3 * 2**20 and n > 128 else []
    return [tile for tile in tiles if call.keep is None and module.can_run(*call[:5], call.activation, tile)]


def candidates(call: Call) -> list[Implementation]:
    """The implementations worth timing for a shape: small outputs need small tiles to fill the chip, large ones large tiles.

    They depend on the shape's class only, as the stored choice does. Each Triton tile takes seconds to compile, so those that
    never won are left out: on an H200, 16-bit outputs of more than 2**18 elements are faster by the CUDA C++ GEMM or a library
    (42 combinations of shape and epilogue, with relu, silu and dropout; dropout in a Triton epilogue takes 1.1 to 1.6 times as
    long as in a pass of its own).
    """
    m, n = shape_class(call.y.shape[0]), call.y.shape[1]
    found = [LIBRARY]
    plain = call.keep is None and call.z is None and call.bias is not None
    if plain and call.activation in ("relu", "gelu_tanh"):
        found.append(EPILOGUE)
    if call.x.dtype == torch.float32 and not _allows_tf32(call.x):
        # Triton's fp32 product without TF32 uses no tensor cores: it beats cuBLAS only where one launch beats two.
        if m * n <= 32 * 1024 and call.x.shape[1] <= 512:
            found += [triton_gemm(16, 16, 64, 2, 3), triton_gemm(32, 32, 64, 4, 2)]
        return found
    tma = kernels("linear").can_use_tma(call.x, call.weight, call.y)
    written_in_cuda = [hopper_gemm(tile) for tile in hopper_tiles(call)]
    found += written_in_cuda
    if m * n > FEW_OUTPUTS and tma and call.x.element_size() == 2 and (written_in_cuda or call.keep is not None):
        return found
    tiles: list[tuple[int, ...]]
    tma_tiles: list[tuple[int, ...]]
    if m * n <= FEW_OUTPUTS:  # few tiles: latency decides, so all of a short k is in flight at once
        tiles = [(16, 16, 256, 4, 4), (32, 32, 128, 4, 4), (32, 64, 64, 4, 4), (64, 64, 64, 4, 4)]
        if call.x.shape[1] <= 1024 and call.x.element_size() == 2:
            tiles += [(16, 8, 1024, 2, 1), (16, 16, 1024, 4, 1), (16, 32, 1024, 4, 1)]
        tma_tiles = [(64, 16, 128, 4, 7, True), (64, 16, 256, 4, 4, True), (64, 32, 128, 4, 6, True)]
    elif m * n <= 4 * 2**20:
        tiles = [(64, 128, 64, 4, 4), (128, 128, 64, 8, 3)]
        tma_tiles = [(64, 128, 128, 4, 4, True), (128, 64, 128, 4, 4, True), (64, 128, 64, 4, 4, True)]
    else:
        tiles = [(128, 128, 64, 8, 3)]
        tma_tiles = [(128, 256, 64, 8, 3, True), (128, 128, 64, 8, 4, True), (128, 128, 64, 4, 3, True, 2)]
    return found + [triton_gemm(*tile) for tile in (*tiles, *(tma_tiles if tma else ()))]


def calls_over_copies(call: Call, cache_bytes: int) -> list[Call]:
    """The call on several copies of its operands; the call alone where there is no room for copies.

    With enough copies, none is still in a cache of `cache_bytes` when its turn comes again. That is how a model runs: between
    two uses of a layer's weights it uses the weights of all other layers.
    """
    enough = cache_bytes * 3 // 2 // (call.x.nbytes + call.weight.nbytes) + 1
    affordable = (
        cache_bytes * 4 // (_span(call.x) + _span(call.weight)) + 1
    )  # copies of narrow views of wide matrices are wide
    copies = min(MAX_COPIES, enough, affordable)
    if (call.x.data_ptr() | call.weight.data_ptr()) % 16:  # copies would be better aligned than the operands
        copies = 1
    try:
        return [call, *(call._replace(x=_copy(call.x), weight=_copy(call.weight)) for _ in range(copies - 1))]
    except torch.OutOfMemoryError:
        return [call]


def _span(tensor: Tensor) -> int:
    """Bytes from its first element to its last: the memory of a copy with the same strides."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.element_size()


def _copy(tensor: Tensor) -> Tensor:
    """A copy with the same strides: not every implementation takes all strides."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return made.copy_(tensor.detach())


def time_implementations(implementations: list[Implementation], call: Call) -> dict[str, float]:
    """The smallest measured GPU time of one call of each implementation, in seconds, with operands that are not in L2."""
    calls = calls_over_copies(call, torch.cuda.get_device_properties(call.x.device).L2_cache_size)

    def on_call(implementation: Implementation) -> Callable[[int], object]:
        return lambda number: implementation.run(calls[number % len(calls)])

    return graph_times({one.name: on_call(one) for one in implementations})


_times_by_device: dict[int, MeasuredTimes] = {}
_chosen: dict[tuple[Any, ...], Implementation] = {}
_forced: list[Implementation] = []


def times_on_device(device: int) -> MeasuredTimes:
    """The times measured on this CUDA device, by this process or an earlier one."""
    if device not in _times_by_device:
        _times_by_device[device] = MeasuredTimes.of_device(device, "linear", *TIMED_SOURCES)
    return _times_by_device[device]


def shape_class(m: int) -> int:
    """Batch sizes share a choice up to the next power of two, from 16 on."""
    return max(16, next_power_of_2(m))


def choose_implementation(call: Call) -> Implementation:
    """The implementation for this call; measured if its shape class is new and the stream is not capturing."""
    if _forced:
        return _forced[-1]
    x, weight, bias = call.x, call.weight, call.bias
    m, k = x.shape
    device = x.device.index
    pointers = x.data_ptr() | weight.data_ptr() | (0 if bias is None else bias.data_ptr())
    aligned = pointers % 16 == 0 and x.stride(0) >= k <= weight.stride(0)  # as the copy engine requires
    key = (
        device, x.dtype, shape_class(m), weight.shape[0], k, call.activation, call.keep is not None,
        call.z is not None, bias is not None, _allows_tf32(x), x.stride(0) % 8, weight.stride(0) % 8, aligned,
    )  # fmt: skip
    known = _chosen.get(key)
    if known is not None:
        return known
    text = " ".join(map(str, key[1:]))
    times = times_on_device(device).times(text)
    capturing_now = torch.cuda.is_current_stream_capturing()
    if capturing_now and not times:
        return LIBRARY
    options = candidates(call)
    if options == [LIBRARY]:  # nothing to measure
        _chosen[key] = LIBRARY
        return LIBRARY
    if any(option.name not in times for option in options):  # nothing yet, or measured when not all of them could run
        if capturing_now:
            return LIBRARY
        with torch.cuda.device(device):
            times = time_implementations(options, call)
        times_on_device(device).add(text, times)
    by_name = {option.name: option for option in options}
    _chosen[key] = by_name[fastest({name: times[name] for name in by_name})]
    return _chosen[key]


def fastest(times: dict[str, float]) -> str:
    """The name of the implementation to take."""
    libraries = (LIBRARY.name, EPILOGUE.name)
    return min(times, key=lambda name: times[name] * (LIBRARY_LEAD if name in libraries else 1))


@contextlib.contextmanager
def force_implementation(implementation: Implementation) -> Iterator[None]:
    """Every call inside the context runs this implementation, whatever was measured."""
    _forced.append(implementation)
    try:
        yield
    finally:
        _forced.pop()
