"""`act(x · Wᵀ + b)` of bf16 or fp16 tensors in CUDA C++, for outputs that fill a Hopper GPU.

The activation of one tile overlaps with the products of the next, which Triton does not do. The kernel is in `cuda/`; this file
compiles it (NVRTC) and launches it.

The activation gets `x · Wᵀ + b` rounded to 16 bits, as in a 16-bit model. In the last tile of a block, and in all GEMMs of
linear.py, it gets fp32.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import NamedTuple

import torch

from onelaunch.integers import ceil_div
from onelaunch.kernels.linear import can_use_tma
from onelaunch.nvrtc.activations import IMPLEMENTED
from onelaunch.nvrtc.activations import constants as activation_constants
from onelaunch.nvrtc.compile import CompileError, compile_cubin, unavailable_reason

HEADERS = Path(__file__).parent / "cuda"
ARCH = "sm_90a"  # no other chip: later ones have other tensor cores
TILE_M, TILE_K, BOX = 128, 64, 64  # rows of y; numbers of k per stage; y is stored in boxes of 64 x 64
THREADS, BAND = 384, 4


class Tile(NamedTuple):
    """Columns of y that a block computes at a time, stages of the operand pipeline, blocks per cluster."""

    n: int
    stages: int
    cluster: int

    def __str__(self) -> str:
        return f"cuda-{TILE_M}x{self.n}x{TILE_K}-s{self.stages}-c{self.cluster}"

    @property
    def shared_bytes(self) -> int:
        operands, y, bias = (TILE_M + self.n) * TILE_K * 2, TILE_M * self.n * 2, self.n * 2
        barriers = (self.stages + 2) * 2 * 8
        return self.stages * operands + y + (self.stages + 1) * bias + barriers + 1024  # to align the start to 1024


LARGE, MEDIUM, SMALL = Tile(256, 3, 2), Tile(128, 5, 2), Tile(64, 8, 1)


class Variant(NamedTuple):
    """The parameters that a kernel is compiled for."""

    tile: Tile
    activation: str | None
    dtype: torch.dtype
    biased: bool
    store_z: bool

    @classmethod
    def of(
        cls, x: torch.Tensor, bias: torch.Tensor | None, z: torch.Tensor | None, activation: str | None, tile: Tile
    ) -> Variant:
        return cls(tile, activation, x.dtype, bias is not None, z is not None)


MAX_SIDE = 2**31 - 1024  # rows or columns: the tensor memory accelerator counts in 32 bits
DTYPES = {torch.bfloat16: "BFLOAT16", torch.float16: "FLOAT16"}  # and their names in tensor maps


def can_run(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    z: torch.Tensor | None,
    activation: str | None,
    tile: Tile,
) -> bool:
    """Whether the chip, the tensors, the activation and the installation allow it. Compiles and loads the kernel."""
    if activation not in (None, *IMPLEMENTED):
        return False
    if x.dtype not in DTYPES or not x.is_cuda or torch.cuda.get_device_capability(x.device) != (9, 0):
        return False
    if not can_use_tma(x, w, y) or max(*x.shape, *y.shape) > MAX_SIDE or y.shape[1] % 8:
        return False
    return (bias is None or bias.data_ptr() % 16 == 0) and _loads(Variant.of(x, bias, z, activation, tile), x.device)


@functools.cache
def _loads(variant: Variant, device: torch.device) -> bool:
    """Whether it compiles and loads. Failures are not raised: other implementations exist, and the tests compile this one."""
    if unavailable_reason():
        return False
    from onelaunch.nvrtc.launch import CudaError

    try:
        _launch_of(variant, device)
    except (CompileError, CudaError):
        return False
    return True


def source_of(variant: Variant) -> str:
    tile, activation, dtype, biased, store_z = variant
    assert activation is None or activation in IMPLEMENTED, activation
    constants = {
        "TILE_M": TILE_M, "TILE_N": tile.n, "TILE_K": TILE_K, "BOX": BOX, "THREADS": THREADS,
        "STAGES": tile.stages, "CLUSTER": tile.cluster, "BAND": BAND, "SHARED_BYTES": tile.shared_bytes,
        "ACTIVATION": (activation or "none").upper(), "IS_BF16": int(dtype == torch.bfloat16),
        "BIASED": int(biased), "STORE_Z": int(store_z),
    }  # fmt: skip
    defined = "".join(f"#define {name} {value}\n" for name, value in constants.items())
    return f'{defined}{activation_constants()}\n#include "tensor_cores.cuh"\n{_multiply(tile.n, dtype)}#include "linear.cuh"\n'


def _multiply(columns: int, dtype: torch.dtype) -> str:
    """The wgmma that multiplies 64 rows of x by `columns` rows of W over 16 of k, and adds to z unless `added` is false."""
    count = columns // 2  # numbers of z per thread
    kind = "bf16" if dtype == torch.bfloat16 else "f16"
    names = ", ".join(f"%{i}" for i in range(count))
    operands = ", ".join(f'"+f"(z[{i}])' for i in range(count))
    return f"""
INLINE void multiply(float (&z)[{count}], u64 x, u64 w, bool added) {{
    asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{count + 2}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} {{{names}}}, %{count}, %{count + 1}, p, 1, 1, 0, 0; }}"
        : {operands} : "l"(x), "l"(w), "r"(int(added)));
}}
"""


@functools.cache
def _launch_of(variant: Variant, device: torch.device):  # type: ignore[no-untyped-def]
    from onelaunch.nvrtc.launch import load

    kernel, tile = load(compile_cubin(source_of(variant), ARCH, headers=HEADERS), "linear", device), variant.tile
    return kernel.often(block=THREADS, cluster=tile.cluster, shared_bytes=tile.shared_bytes)


@functools.lru_cache(4096)
def tensor_map(address: int, rows: int, columns: int, row_bytes: int, box_rows: int, dtype: torch.dtype) -> bytes:
    """A matrix for the tensor memory accelerator: boxes of `box_rows` x 64, swizzled; zero outside the matrix."""
    from cuda.bindings import driver

    status, made = driver.cuTensorMapEncodeTiled(
        getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{DTYPES[dtype]}"),
        2,
        address,
        [driver.cuuint64_t(columns), driver.cuuint64_t(rows)],
        [driver.cuuint64_t(row_bytes)],
        [driver.cuuint32_t(BOX), driver.cuuint32_t(box_rows)],
        [driver.cuuint32_t(1)] * 2,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(
            f"cuTensorMapEncodeTiled returns {status.name} for {rows} x {columns}, {row_bytes} bytes per row"
        )
    return ctypes.string_at(int(made.getPtr()), 128)


def linear_forward(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    z: torch.Tensor | None = None,
    *,
    activation: str | None,
    tile: Tile,
) -> None:
    """Write y and, where given, z (before the activation). x is `[m, k]`, w `[n, k]`, rows contiguous; needs `can_run`."""
    (m, k), n = x.shape, w.shape[0]
    with torch.cuda.device(x.device):
        launch = _launch_of(Variant.of(x, bias, z, activation, tile), x.device)
        launch.bind_thread()  # the tensor maps need it too
        clusters = min(ceil_div(m, TILE_M * tile.cluster) * ceil_div(n, tile.n), launch.clusters_at_once)
        maps = [
            tensor_map(matrix.data_ptr(), *matrix.shape, matrix.stride(0) * 2, box_rows, x.dtype)
            for matrix, box_rows in ((x, TILE_M), (w, tile.n // tile.cluster), (y, BOX), (y if z is None else z, BOX))
        ]
        stream = torch._C._cuda_getCurrentRawStream(x.device.index)
        launch(stream, clusters * tile.cluster, (*maps, 0 if bias is None else bias.data_ptr(), m, n, k))
