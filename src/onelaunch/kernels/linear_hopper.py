"""`act(x · Wᵀ + b)` of halves in CUDA C++, for outputs that fill a Hopper: the activation of one tile hides behind the products
of the next, which Triton does not do. What it is written in is in `cuda/`; here it is compiled (NVRTC) and launched.

The activation gets `x · Wᵀ + b` rounded to a half, as in a model of halves; in the last tile of a block, and in all of
linear.py's GEMMs, it gets fp32.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import NamedTuple

import torch

from onelaunch.kernels.launch import cdiv
from onelaunch.kernels.linear import can_use_tma
from onelaunch.nvrtc.compile import CompileError, compile_cubin, unavailable_reason

HEADERS = Path(__file__).parent / "cuda"
ARCH = "sm_90a"  # of no other chip: later ones have other tensor cores
TILE_M, TILE_K, BOX = 128, 64, 64  # rows of y; halves of k that a stage holds; y leaves in boxes of 64 x 64
THREADS, BAND = 384, 4


class Tile(NamedTuple):
    """Columns of y that a block makes at a time, stages of operands on their way, blocks of a cluster."""

    n: int
    stages: int
    cluster: int

    def __str__(self) -> str:
        return f"cuda-{TILE_M}x{self.n}x{TILE_K}-s{self.stages}-c{self.cluster}"

    @property
    def shared_bytes(self) -> int:
        operands, y, bias = (TILE_M + self.n) * TILE_K * 2, TILE_M * self.n * 2, self.n * 2
        barriers = (self.stages + 2) * 2 * 8
        return self.stages * operands + y + (self.stages + 1) * bias + barriers + 1024  # to start on a multiple of that


LARGE, MEDIUM, SMALL = Tile(256, 3, 2), Tile(128, 5, 2), Tile(64, 8, 1)


class Variant(NamedTuple):
    """What a kernel is compiled for."""

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


MOST = 2**31 - 1024  # rows or columns: the copy engine counts in 32 bits
HALVES = {torch.bfloat16: "BFLOAT16", torch.float16: "FLOAT16"}  # as tensor maps call them


def can_run(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    z: torch.Tensor | None,
    activation: str | None,
    tile: Tile,
) -> bool:
    """Whether this chip, these tensors and what is installed allow it. It is compiled and loaded for the answer."""
    if x.dtype not in HALVES or not x.is_cuda or torch.cuda.get_device_capability(x.device) != (9, 0):
        return False
    if not can_use_tma(x, w, y) or max(*x.shape, *y.shape) > MOST or y.shape[1] % 8:
        return False
    return (bias is None or bias.data_ptr() % 16 == 0) and _loads(Variant.of(x, bias, z, activation, tile), x.device)


@functools.cache
def _loads(variant: Variant, device: torch.device) -> bool:
    """False for whatever is not as it should be: other implementations run everywhere, and tests compile this one."""
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
    constants = {
        "TILE_M": TILE_M, "TILE_N": tile.n, "TILE_K": TILE_K, "BOX": BOX, "THREADS": THREADS,
        "STAGES": tile.stages, "CLUSTER": tile.cluster, "BAND": BAND, "SHARED_BYTES": tile.shared_bytes,
        "ACTIVATION": (activation or "none").upper(), "HALF_IS_BF16": int(dtype == torch.bfloat16),
        "BIASED": int(biased), "STORE_Z": int(store_z),
    }  # fmt: skip
    defined = "".join(f"#define {name} {value}\n" for name, value in constants.items())
    return f'{defined}#include "tensor_cores.cuh"\n{_multiply(tile.n, dtype)}#include "linear.cuh"\n'


def _multiply(columns: int, dtype: torch.dtype) -> str:
    """64 rows of x by so many rows of W, 16 of k, added to z (or, with nothing before them, put there)."""
    count = columns // 2  # numbers of z that a thread holds
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
    """A matrix as the copy engine knows it: boxes of `box_rows` x 64, swizzled; what lies outside is zero."""
    from cuda.bindings import driver

    status, made = driver.cuTensorMapEncodeTiled(
        getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{HALVES[dtype]}"),
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
            f"cuTensorMapEncodeTiled returns {status.name} for {rows} x {columns}, {row_bytes} bytes a row"
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
    """Fills y, and z (before the activation) where given; x is `[m, k]`, w `[n, k]`, rows contiguous; `can_run` said yes."""
    (m, k), n = x.shape, w.shape[0]
    with torch.cuda.device(x.device):
        launch = _launch_of(Variant.of(x, bias, z, activation, tile), x.device)
        launch.bind_thread()  # for the tensor maps too
        clusters = min(cdiv(m, TILE_M * tile.cluster) * cdiv(n, tile.n), launch.clusters_at_once)
        maps = [
            tensor_map(matrix.data_ptr(), *matrix.shape, matrix.stride(0) * 2, box_rows, x.dtype)
            for matrix, box_rows in ((x, TILE_M), (w, tile.n // tile.cluster), (y, BOX), (y if z is None else z, BOX))
        ]
        stream = torch._C._cuda_getCurrentRawStream(x.device.index)
        launch(stream, clusters * tile.cluster, (*maps, 0 if bias is None else bias.data_ptr(), m, n, k))
