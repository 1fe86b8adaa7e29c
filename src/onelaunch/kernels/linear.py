"""`dropout(act(x · Wᵀ + b))` in one GEMM: bias, activation and dropout act on the accumulators before they leave the chip.

Two kernels share one epilogue. `linear_kernel` takes any shape. `linear_tma_kernel` is for Hopper and later: operand tiles are
loaded by the tensor memory accelerator, and a persistent program per multiprocessor processes many output tiles.
Dropout numbers its elements as `activation_dropout` does, so that the mask does not depend on the implementation or the tile.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from onelaunch.integers import ceil_div
from onelaunch.kernels.dependent_launch import allow_next_kernel, overlaps, wait_for_previous_kernel
from onelaunch.kernels.dropout_key import DropoutKey
from onelaunch.kernels.gemm_tile import GemmTile
from onelaunch.kernels.launch import call, launch, launch_options
from onelaunch.kernels.tiles import activate, kept, load_key, pack_bits
from onelaunch.rng import keep_scale, keep_threshold


@triton.jit
def finish_tile(
    z,
    row,
    column,
    y_ptr,
    y_tiles,
    z_ptr,
    keep_ptr,
    key_ptr,
    seed,
    offset,
    threshold,
    scale,
    m,
    n,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Apply activation and dropout to one fp32 tile z of `x · Wᵀ + b` and store it; y through its descriptor if given."""
    inside = (row < m)[:, None] & (column < n)[None, :]
    element = row.to(tl.int64)[:, None] * n + column[None, :]
    if z_ptr is not None:
        tl.store(z_ptr + element, z.to(z_ptr.dtype.element_ty), mask=inside)
    y = activate(z, ACTIVATION)
    if keep_ptr is not None:
        seed, offset = load_key(key_ptr, seed, offset)
        groups_per_row = tl.cdiv(n, 8)
        group = tl.min(column, axis=0) // 8 + tl.arange(0, BLOCK_N // 8)
        number = row.to(tl.int64)[:, None] * groups_per_row + group[None, :]
        groups = tl.reshape(z, (BLOCK_M, BLOCK_N // 8, 8))
        keep = kept(groups, seed, offset, number, threshold)
        if ACTIVATION == "relu":
            keep = keep & ((groups <= 0) == 0)
        y = tl.where(keep, tl.reshape(y, (BLOCK_M, BLOCK_N // 8, 8)) * scale, 0.0)
        y = tl.reshape(y, (BLOCK_M, BLOCK_N))
        tl.store(keep_ptr + number, pack_bits(keep), mask=(row < m)[:, None] & (group < groups_per_row)[None, :])
    if y_tiles is not None:
        y_tiles.store([tl.min(row, axis=0), tl.min(column, axis=0)], y.to(y_tiles.dtype))
    else:
        tl.store(y_ptr + element, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def tile_of(tile, m, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BAND: tl.constexpr):
    """Tile number -> (tile row, tile column), in bands of tile rows, so that neighbouring programs share operands in L2."""
    tiles_m = tl.cdiv(m, BLOCK_M)
    tiles_n = tl.cdiv(n, BLOCK_N)
    band = tile // (BAND * tiles_n)
    height = tl.minimum(tiles_m - band * BAND, BAND)
    within = tile % (BAND * tiles_n)
    return band * BAND + within % height, within // height


@triton.jit(do_not_specialize=["seed", "offset", "threshold"])
def linear_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    y_ptr,
    z_ptr,
    keep_ptr,
    key_ptr,
    seed: tl.int64,
    offset: tl.int64,
    threshold: tl.int32,
    scale,
    m,
    n,
    k,
    x_stride,
    w_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    allow_next_kernel(OVERLAP)
    wait_for_previous_kernel(OVERLAP)
    tile_m, tile_n = tile_of(tl.program_id(0), m, n, BLOCK_M, BLOCK_N, BAND)
    row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, BLOCK_K)
    x_tile = x_ptr + row.to(tl.int64)[:, None] * x_stride + inner[None, :]
    w_tile = w_ptr + column.to(tl.int64)[None, :] * w_stride + inner[:, None]
    row_inside = (row < m)[:, None]
    column_inside = (column < n)[None, :]
    z = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, k, BLOCK_K):
        left = k - start
        x = tl.load(x_tile, mask=row_inside & (inner < left)[None, :], other=0.0)
        w = tl.load(w_tile, mask=column_inside & (inner < left)[:, None], other=0.0)
        z = tl.dot(x, w, z, input_precision=PRECISION)
        x_tile += BLOCK_K
        w_tile += BLOCK_K
    if bias_ptr is not None:
        z += tl.load(bias_ptr + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
    finish_tile(
        z, row, column, y_ptr, None, z_ptr, keep_ptr, key_ptr, seed, offset, threshold, scale, m, n,
        BLOCK_M, BLOCK_N, ACTIVATION,
    )  # fmt: skip


@triton.jit(do_not_specialize=["seed", "offset", "threshold"])
def linear_tma_kernel(
    x_tiles,
    w_tiles,
    bias_ptr,
    y_tiles,
    z_ptr,
    keep_ptr,
    key_ptr,
    seed: tl.int64,
    offset: tl.int64,
    threshold: tl.int32,
    scale,
    m,
    n,
    k,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    allow_next_kernel(OVERLAP)
    wait_for_previous_kernel(OVERLAP)
    tiles = tl.cdiv(m, BLOCK_M) * tl.cdiv(n, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=True):
        tile_m, tile_n = tile_of(tile, m, n, BLOCK_M, BLOCK_N, BAND)
        z = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, k, BLOCK_K):
            x = x_tiles.load([tile_m * BLOCK_M, start])
            w = w_tiles.load([tile_n * BLOCK_N, start])
            z = tl.dot(x, w.T, z, input_precision=PRECISION)
        row = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        column = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        if bias_ptr is not None:
            z += tl.load(bias_ptr + column, mask=column < n, other=0.0).to(tl.float32)[None, :]
        finish_tile(
            z, row, column, None, y_tiles, z_ptr, keep_ptr, key_ptr, seed, offset, threshold, scale, m, n,
            BLOCK_M, BLOCK_N, ACTIVATION,
        )  # fmt: skip


def can_use_tma(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether the tensor memory accelerator can access all three: Hopper or later, and rows as it requires them."""
    if x.device.type != "cuda" or torch.cuda.get_device_capability(x.device)[0] < 9:
        return False
    return all(lies_in_rows(t) for t in (x, w, y))


def lies_in_rows(t: torch.Tensor) -> bool:
    """Whether rows start at multiples of 16 bytes and do not overlap. (A contiguous single row may have any stride.)"""
    return t.data_ptr() % 16 == 0 and t.stride(0) * t.element_size() % 16 == 0 and t.stride(0) >= t.shape[1]


def linear_forward(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    z: torch.Tensor | None,
    keep: torch.Tensor | None,
    *,
    activation: str | None,
    p: float,
    key: DropoutKey,
    tile: GemmTile,
    tf32: bool,
    overlap: bool = True,
) -> None:
    """Fill y, and z (before the activation) and keep where given; x is `[m, k]`, w is `[n, k]`, with contiguous rows.

    With `overlap` the kernel may start before the previous one has ended, on chips that support it.
    """
    m, k = x.shape
    n = w.shape[0]
    values = (key.seed, key.offset, keep_threshold(p), keep_scale(p))
    overlap = overlap and overlaps(x)
    constants = (tile.m, tile.n, tile.k, 8, activation, "tf32" if tf32 else "ieee", overlap)
    tiles = ceil_div(m, tile.m) * ceil_div(n, tile.n)
    if not tile.tma:
        launch(
            linear_kernel,
            (tiles,),
            (x, w, bias, y, z, keep, key.memory),
            values,
            (m, n, k, x.stride(0), w.stride(0)),
            constants,
            num_warps=tile.warps,
            num_stages=tile.stages,
            launch_pdl=overlap,
        )
        return
    from triton.tools.tensor_descriptor import TensorDescriptor

    x_tiles = TensorDescriptor(x, list(x.shape), list(x.stride()), [tile.m, tile.k])
    w_tiles = TensorDescriptor(w, list(w.shape), list(w.stride()), [tile.n, tile.k])
    y_tiles = TensorDescriptor(y, list(y.shape), list(y.stride()), [tile.m, tile.n])
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    programs = min(tiles, processors * tile.per_multiprocessor)
    with torch.cuda.device(x.device):
        call(
            linear_tma_kernel,
            (programs,),
            x_tiles,
            w_tiles,
            bias,
            y_tiles,
            z,
            keep,
            key.memory,
            *values,
            m,
            n,
            k,
            *constants,
            **launch_options(tile.warps, tile.stages, overlap),
        )
