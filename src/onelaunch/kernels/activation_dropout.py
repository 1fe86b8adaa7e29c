"""`dropout(act(z + bias))` over a matrix in one pass, and its gradient with the bias gradient in one pass.

It follows a library GEMM where that beats a GEMM with a fused epilogue. Backward reads the gradient, the keep bits and, for
activations whose derivative the bits do not determine, one saved matrix. It writes dz and per-program column sums. A second,
tiny kernel adds these in a fixed order, so that every run gives the same bits.

Keep bits are stored per row, `[m, ceil(n / 8)]`. For dropout an element has the number `row * 8 * ceil(n / 8) + column`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from onelaunch.integers import ceil_div, next_power_of_2
from onelaunch.kernels.dependent_launch import allow_next_kernel, overlaps, wait_for_previous_kernel
from onelaunch.kernels.dropout_key import DropoutKey
from onelaunch.kernels.launch import launch
from onelaunch.kernels.tiles import (
    INVERSE_SQRT_2PI,
    activate,
    activation_gradient,
    activation_gradient_from_output,
    kept,
    load_key,
    normal_cdf,
    pack_bits,
    relu_and_drop,
    scattered,
    unpack_bits,
)
from onelaunch.rng import keep_scale, keep_threshold

GROUPS_PER_TILE = 256  # groups of 8 elements: 2048 elements for 128 threads, two 16-byte loads each in bf16
BACKWARD_PROGRAMS = 132 * 8  # enough to fill the largest chips; more only lengthen the sum over programs
# Tall tiles for small batches. On an H200, tall tiles and tiles along the rows (with a second kernel) take: 128 x 784: 1.7 and
# 3.4 us; 512 x 512: 4.6 and 4.3 us.
TALL_ROWS, MAX_TALL_ROWS, MAX_TALL_ELEMENTS = 128, 256, 2**20


@triton.jit
def _activate(z, ACTIVATION: tl.constexpr):
    if ACTIVATION == "gelu":
        cdf, _ = normal_cdf(z)
        y = z * cdf
    else:
        y = activate(z, ACTIVATION)
    return y


@triton.jit
def _activation_gradient(z, ACTIVATION: tl.constexpr):
    if ACTIVATION == "gelu":
        cdf, bell = normal_cdf(z)
        slope = cdf + z * bell * INVERSE_SQRT_2PI
    else:
        slope = activation_gradient(z, ACTIVATION)
    return slope


@triton.jit(do_not_specialize=["seed", "offset", "threshold"])
def activation_dropout_forward_kernel(
    z_ptr,
    bias_ptr,
    y_ptr,
    keep_ptr,
    key_ptr,
    seed: tl.int64,
    offset: tl.int64,
    threshold: tl.int32,
    scale,
    m,
    n,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    STORE_Z: tl.constexpr,
):
    position = tl.arange(0, ROWS * GROUPS)  # one axis, for the reason given in batch_norm_tiles.py
    row = tl.program_id(0).to(tl.int64) * ROWS + position // GROUPS
    group = tl.program_id(1) * GROUPS + position % GROUPS
    column = group[:, None] * 8 + tl.arange(0, 8)[None, :]
    inside = (row < m)[:, None] & (column < n)
    element = row[:, None] * n + column

    z = tl.load(z_ptr + element, mask=inside, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        z += tl.load(bias_ptr + column, mask=column < n, other=0.0).to(tl.float32)
    if STORE_Z:
        tl.store(z_ptr + element, z.to(z_ptr.dtype.element_ty), mask=inside)
    if keep_ptr is None:
        y = _activate(z, ACTIVATION)
    else:
        seed, offset = load_key(key_ptr, seed, offset)
        groups_per_row = tl.cdiv(n, 8)
        number = scattered(row * groups_per_row + group)
        if ACTIVATION == "relu":
            y, bits = relu_and_drop(z * scale, seed, offset, number, threshold, y_ptr.dtype.element_ty)
        else:
            keep = kept(z, seed, offset, number, threshold)
            y = tl.where(keep, _activate(z, ACTIVATION) * scale, 0.0)
            bits = pack_bits(keep)
        tl.store(keep_ptr + number, bits, mask=(row < m) & (group < groups_per_row))
    tl.store(y_ptr + element, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def activation_dropout_backward_kernel(
    dy_ptr,
    saved_ptr,
    keep_ptr,
    dz_ptr,
    sums_ptr,
    scale,
    inverse_scale,
    m,
    n,
    steps,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FROM_OUTPUT: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A program processes `steps` tiles down its columns and writes its column sums to row `program_id(0)` of `sums`."""
    position = tl.arange(0, ROWS * GROUPS)
    group = tl.program_id(1) * GROUPS + position % GROUPS
    column = group[:, None] * 8 + tl.arange(0, 8)[None, :]
    groups_per_row = tl.cdiv(n, 8)
    sums = tl.zeros((ROWS * GROUPS, 8), tl.float32)
    first = tl.program_id(0).to(tl.int64) * steps * ROWS
    for step in range(steps):
        row = first + step * ROWS + position // GROUPS
        inside = (row < m)[:, None] & (column < n)
        element = row[:, None] * n + column
        dz = tl.load(dy_ptr + element, mask=inside, other=0.0).to(tl.float32)
        if saved_ptr is not None:
            saved = tl.load(saved_ptr + element, mask=inside, other=0.0).to(tl.float32)
            if FROM_OUTPUT:
                dz *= activation_gradient_from_output(saved * inverse_scale, ACTIVATION)
            else:
                dz *= _activation_gradient(saved, ACTIVATION)
        if keep_ptr is not None:
            number = scattered(row * groups_per_row + group)
            bits = tl.load(keep_ptr + number, mask=(row < m) & (group < groups_per_row), other=0)
            dz = tl.where(unpack_bits(bits), dz * scale, 0.0)
        tl.store(dz_ptr + element, dz.to(dz_ptr.dtype.element_ty), mask=inside)
        if sums_ptr is not None:
            sums += dz
    allow_next_kernel(OVERLAP)
    if sums_ptr is not None:
        total = tl.sum(tl.reshape(sums, (ROWS, GROUPS, 8)), axis=0)
        column = tl.program_id(1) * GROUPS * 8 + tl.arange(0, GROUPS)[:, None] * 8 + tl.arange(0, 8)[None, :]
        target = sums_ptr + tl.program_id(0).to(tl.int64) * n + column
        tl.store(target, total.to(sums_ptr.dtype.element_ty), mask=column < n)


@triton.jit
def column_sum_kernel(sums_ptr, out_ptr, parts, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr, OVERLAP: tl.constexpr):
    wait_for_previous_kernel(OVERLAP)
    allow_next_kernel(OVERLAP)  # its few programs are all resident
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, parts, ROWS):
        part = start + tl.arange(0, ROWS)
        inside = (part < parts)[:, None] & (column < n)[None, :]
        total += tl.load(sums_ptr + part.to(tl.int64)[:, None] * n + column[None, :], mask=inside, other=0.0)
    tl.store(out_ptr + column, tl.sum(total, axis=0).to(out_ptr.dtype.element_ty), mask=column < n)


def tile_shape(n: int, groups_per_tile: int = GROUPS_PER_TILE) -> tuple[int, int]:
    """(rows, groups) of a tile over a matrix with n columns."""
    groups = min(128, next_power_of_2(ceil_div(n, 8)))
    return groups_per_tile // groups, groups


def backward_tile(m: int, n: int) -> tuple[int, int, int]:
    """(rows of a tile, groups of a tile, tiles per program) of the backward pass.

    A small batch takes tall tiles: a program has whole columns, so that its sums are the bias gradient without a second kernel.
    """
    if m <= MAX_TALL_ROWS and m * n <= MAX_TALL_ELEMENTS:
        rows = min(TALL_ROWS, next_power_of_2(m))
        return rows, min(GROUPS_PER_TILE // rows, next_power_of_2(ceil_div(n, 8))), ceil_div(m, rows)
    rows, groups = tile_shape(n)
    tiles = ceil_div(m, rows)
    # A power of two: Triton specialises on some values of the step count, and few values mean few compiled kernels.
    steps = next_power_of_2(ceil_div(tiles * ceil_div(n, groups * 8), BACKWARD_PROGRAMS))
    return rows, groups, steps


def activation_dropout_forward(
    z: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    keep: torch.Tensor | None,
    *,
    activation: str | None,
    p: float,
    key: DropoutKey,
    store_z: bool = False,
) -> None:
    """Fill y (may be z) and keep from contiguous matrices; with `store_z`, z becomes z + bias."""
    m, n = z.shape
    if not z.numel():
        return
    rows, groups = tile_shape(n)
    launch(
        activation_dropout_forward_kernel,
        (ceil_div(m, rows), ceil_div(n, groups * 8)),
        (z, bias, y, keep, key.memory),
        (key.seed, key.offset, keep_threshold(p), keep_scale(p)),
        (m, n),
        (rows, groups, activation, store_z),
    )


def activation_dropout_backward(
    dy: torch.Tensor,
    saved: torch.Tensor | None,
    keep: torch.Tensor | None,
    dz: torch.Tensor,
    dbias: torch.Tensor | None,
    *,
    activation: str | None,
    from_output: bool,
    p: float,
) -> None:
    """Fill dz (may be dy) and dbias. `saved` is the output (`from_output`) or z; relu with keep bits needs neither."""
    m, n = dy.shape
    if not dy.numel():
        if dbias is not None:
            dbias.zero_()
        return
    rows, groups, steps = backward_tile(m, n)
    parts = ceil_div(m, rows * steps)
    sums = dbias
    if dbias is not None and parts > 1:
        sums = torch.empty((parts, n), dtype=torch.float32, device=dy.device)
    launch(
        activation_dropout_backward_kernel,
        (parts, ceil_div(n, groups * 8)),
        (dy, saved, keep, dz, sums),
        (keep_scale(p), 1 - p),
        (m, n, steps),
        (rows, groups, activation, from_output, overlaps(dy) and parts > 1),
    )
    if dbias is not None and sums is not None and parts > 1:
        column_sums(sums, dbias)


def column_sums(sums: torch.Tensor, out: torch.Tensor) -> None:
    """Fill `out` with the column sums of an fp32 matrix, added in a fixed order."""
    parts, n = sums.shape
    # Few iterations, and whole 32-byte sectors.
    rows, columns = (64, 32) if parts <= 64 else (min(512, next_power_of_2(parts)), 8)
    overlap = overlaps(sums)
    constants = (rows, columns, overlap)
    launch(column_sum_kernel, (ceil_div(n, columns),), (sums, out), (), (parts, n), constants, launch_pdl=overlap)
