"""A small MLP, linear → activation → … → linear, in one kernel forward and two backward.

A program takes some rows through all layers. What a layer hands to the next goes through memory that only this program uses,
so a barrier of its threads is all that stands between two layers. Backward, each program writes its own gradients of all
parameters, and a second kernel adds them in a fixed order.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from onelaunch.activations import saves_input
from onelaunch.integers import ceil_div
from onelaunch.kernels.launch import call
from onelaunch.kernels.mlp_shape import Shape
from onelaunch.kernels.tiles import activate, activation_gradient, activation_gradient_from_output

SUMMED, PROGRAMS_AT_ONCE = 256, 16  # elements per program of `add_gradients_kernel`; addends that it loads together


@triton.jit
def load_tile(ptr, row, rows, column, stride, WIDTH: tl.constexpr):
    """`[row, column]` of a matrix of WIDTH columns; 0 outside."""
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    return tl.load(ptr + row.to(tl.int64)[:, None] * stride + column[None, :], mask=inside, other=0.0)


@triton.jit
def store_tile(ptr, tile, row, rows, column, stride, WIDTH: tl.constexpr):
    """The inverse of `load_tile`, in the type of the memory."""
    inside = (row < rows)[:, None] & (column < WIDTH)[None, :]
    at = ptr + row.to(tl.int64)[:, None] * stride + column[None, :]
    tl.store(at, tile.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def load_values(ptr, row, rows, column, stride, WIDTH: tl.constexpr, ACTIVATION: tl.constexpr):
    """A tile of a layer's input, whose activation is still to be applied unless ACTIVATION is None."""
    values = load_tile(ptr, row, rows, column, stride, WIDTH)
    return activate(values.to(tl.float32), ACTIVATION).to(ptr.dtype.element_ty) if ACTIVATION is not None else values


@triton.jit
def product(
    ptr, row, rows, stride, matrix_ptr, first, WIDTH: tl.constexpr, BLOCK: tl.constexpr, OUTPUTS: tl.constexpr,
    OUTPUT_BLOCK: tl.constexpr, DOWN: tl.constexpr, ALONG: tl.constexpr, ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Columns from `first` of `values · matrix`, in fp32, for a matrix `[WIDTH, OUTPUTS]` with the strides DOWN and ALONG."""
    output = first + tl.arange(0, OUTPUT_BLOCK)
    total = tl.zeros((row.shape[0], OUTPUT_BLOCK), tl.float32)
    for start in range(0, WIDTH, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = (column < WIDTH)[:, None] & (output < OUTPUTS)[None, :]
        part = tl.load(matrix_ptr + column[:, None] * DOWN + output[None, :] * ALONG, mask=inside, other=0.0)
        values = load_values(ptr, row, rows, column, stride, WIDTH, ACTIVATION)
        total = tl.dot(values, part, total, input_precision=PRECISION)
    return total


@triton.jit
def mlp_forward_kernel(
    x_ptr,
    weights,
    biases,
    saved_ptr,
    y_ptr,
    rows,
    LAYERS: tl.constexpr,
    WIDTHS: tl.constexpr,
    BLOCKS: tl.constexpr,
    DEPTHS: tl.constexpr,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SAVES_INPUT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """saved: `[rows, HIDDEN[-1]]`, of each hidden layer the values that its activation's derivative needs."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    for layer in tl.static_range(LAYERS):
        source = x_ptr if layer == 0 else saved_ptr + HIDDEN[layer - 1]
        stride = WIDTHS[0] if layer == 0 else HIDDEN[LAYERS - 1]
        for first in range(0, WIDTHS[layer + 1], BLOCKS[layer + 1]):
            z = product(
                source, row, rows, stride, weights[layer], first, WIDTHS[layer], DEPTHS[layer], WIDTHS[layer + 1],
                BLOCKS[layer + 1], 1, WIDTHS[layer], ACTIVATION if layer > 0 and SAVES_INPUT else None, PRECISION,
            )  # fmt: skip
            column = first + tl.arange(0, BLOCKS[layer + 1])
            if biases[layer] is not None:
                z += tl.load(biases[layer] + column, mask=column < WIDTHS[layer + 1], other=0.0).to(tl.float32)[None, :]
            if layer == LAYERS - 1:
                store_tile(y_ptr, z, row, rows, column, WIDTHS[LAYERS], WIDTHS[LAYERS])
            else:
                kept = z if SAVES_INPUT else activate(z, ACTIVATION)
                store_tile(saved_ptr + HIDDEN[layer], kept, row, rows, column, HIDDEN[LAYERS - 1], WIDTHS[layer + 1])
        tl.debug_barrier()  # the next layer reads what this program's other threads have written


@triton.jit
def mlp_backward_kernel(
    dy_ptr,
    x_ptr,
    weights,
    saved_ptr,
    dz_ptr,
    dx_ptr,
    sums_ptr,
    rows,
    LAYERS: tl.constexpr,
    WIDTHS: tl.constexpr,
    BLOCKS: tl.constexpr,
    DEPTHS: tl.constexpr,
    HIDDEN: tl.constexpr,
    GRADIENTS: tl.constexpr,
    BIASED: tl.constexpr,
    ROWS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SAVES_INPUT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """sums: the parameters' gradients over this program's rows, fp32 `[programs, GRADIENTS[-1]]`; dz is like saved.

    dx may be None.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    sums = sums_ptr + tl.program_id(0).to(tl.int64) * GRADIENTS[2 * LAYERS]
    for layer in tl.static_range(LAYERS - 1, -1, -1):
        gradient = dy_ptr if layer == LAYERS - 1 else dz_ptr + HIDDEN[layer]
        gradient_stride = WIDTHS[LAYERS] if layer == LAYERS - 1 else HIDDEN[LAYERS - 1]
        source = x_ptr if layer == 0 else saved_ptr + HIDDEN[layer - 1]
        stride = WIDTHS[0] if layer == 0 else HIDDEN[LAYERS - 1]
        if layer > 0 or dx_ptr is not None:
            for first in range(0, WIDTHS[layer], BLOCKS[layer]):
                dh = product(
                    gradient, row, rows, gradient_stride, weights[layer], first, WIDTHS[layer + 1], DEPTHS[layer + 1],
                    WIDTHS[layer], BLOCKS[layer], WIDTHS[layer], 1, None, PRECISION,
                )  # fmt: skip
                column = first + tl.arange(0, BLOCKS[layer])
                if layer == 0:
                    store_tile(dx_ptr, dh, row, rows, column, WIDTHS[0], WIDTHS[0])
                else:
                    saved = load_tile(source, row, rows, column, stride, WIDTHS[layer]).to(tl.float32)
                    if SAVES_INPUT:
                        dh *= activation_gradient(saved, ACTIVATION)
                    else:
                        dh *= activation_gradient_from_output(saved, ACTIVATION)
                    store_tile(dz_ptr + HIDDEN[layer - 1], dh, row, rows, column, stride, WIDTHS[layer])
        # In tiles of at most 32 outputs, for which Triton does not use wgmma: with 64 outputs, 64 rows of 16 bits and wgmma,
        # Triton 3.6 computed wrong sums.
        for first in range(0, WIDTHS[layer + 1], DEPTHS[layer + 1]):
            output = first + tl.arange(0, DEPTHS[layer + 1])
            dz = load_tile(gradient, row, rows, output, gradient_stride, WIDTHS[layer + 1])
            if BIASED[layer]:
                dbias = tl.sum(dz.to(tl.float32), axis=0)
                tl.store(sums + GRADIENTS[2 * layer + 1] + output, dbias, mask=output < WIDTHS[layer + 1])
            for start in range(0, WIDTHS[layer], BLOCKS[layer]):
                column = start + tl.arange(0, BLOCKS[layer])
                values = load_values(
                    source, row, rows, column, stride, WIDTHS[layer], ACTIVATION if layer > 0 and SAVES_INPUT else None
                )
                dweight = tl.dot(tl.trans(dz), values, input_precision=PRECISION)
                inside = (output < WIDTHS[layer + 1])[:, None] & (column < WIDTHS[layer])[None, :]
                at = sums + GRADIENTS[2 * layer] + output[:, None] * WIDTHS[layer] + column[None, :]
                tl.store(at, dweight, mask=inside)
        tl.debug_barrier()  # the layer below reads the gradient that this program's other threads have written


@triton.jit
def add_gradients_kernel(
    sums_ptr, total_ptr, programs, STARTS: tl.constexpr, SIZES: tl.constexpr, PARTS: tl.constexpr,
    SUMMED: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """The sums of all programs' gradients, in the order of the programs. Nothing is written between two parts."""
    element = tl.program_id(0) * SUMMED + tl.arange(0, SUMMED)
    inside = element < 0
    for part in tl.static_range(PARTS):
        inside |= (element >= STARTS[part]) & (element < STARTS[part] + SIZES[part])
    total = tl.zeros((SUMMED,), tl.float32)
    for first in range(0, programs, AT_ONCE):
        program = first + tl.arange(0, AT_ONCE)
        at = sums_ptr + program.to(tl.int64)[:, None] * STARTS[PARTS] + element[None, :]
        total += tl.sum(tl.load(at, mask=(program < programs)[:, None] & inside[None, :], other=0.0), axis=0)
    tl.store(total_ptr + element, total.to(total_ptr.dtype.element_ty), mask=inside)


def rows_per_program(rows: int) -> int:
    """Few rows keep many multiprocessors busy; for many rows the sums of fewer programs are to be added."""
    return 16 if rows <= 2048 else 32


def programs_of(rows: int) -> int:
    return ceil_div(rows, rows_per_program(rows))


def _constants(shape: Shape, rows: int, activation: str, tf32: bool) -> dict[str, Any]:
    """What both kernels are compiled for. Without tf32, fp32 products are computed as three of tf32, to fp32's accuracy."""
    return {
        "LAYERS": len(shape.biased), "WIDTHS": shape.widths, "BLOCKS": shape.blocks, "DEPTHS": shape.depths,
        "HIDDEN": shape.hidden, "ROWS": rows_per_program(rows), "ACTIVATION": activation,
        "SAVES_INPUT": saves_input(activation), "PRECISION": "tf32" if tf32 else "tf32x3", "num_warps": 4, "num_stages": 1,
    }  # fmt: skip


def mlp_forward(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None], saved: torch.Tensor,
    y: torch.Tensor, shape: Shape, *, activation: str, tf32: bool,
) -> None:  # fmt: skip
    """Fill y and `saved`, `[rows, shape.hidden[-1]]`. All tensors are contiguous."""
    call(
        mlp_forward_kernel, (programs_of(len(x)),), x, tuple(weights), tuple(biases), saved, y, len(x),
        **_constants(shape, len(x), activation, tf32),
    )  # fmt: skip


def mlp_backward(
    dy: torch.Tensor, x: torch.Tensor, weights: Sequence[torch.Tensor], saved: torch.Tensor, dx: torch.Tensor | None,
    gradients: torch.Tensor, shape: Shape, *, activation: str, tf32: bool,
) -> None:  # fmt: skip
    """Fill dx where given, and `gradients`, `[shape.gradients[-1]]`, with those of all weights and biases."""
    programs, dz = programs_of(len(x)), torch.empty_like(saved)
    sums = torch.empty(programs, len(gradients), dtype=torch.float32, device=x.device)
    call(
        mlp_backward_kernel, (programs,), dy, x, tuple(weights), saved, dz, dx, sums, len(x), GRADIENTS=shape.gradients,
        BIASED=shape.biased, **_constants(shape, len(x), activation, tf32),
    )  # fmt: skip
    call(
        add_gradients_kernel, (ceil_div(len(gradients), SUMMED),), sums, gradients, programs, STARTS=shape.gradients,
        SIZES=shape.sizes, PARTS=len(shape.sizes), SUMMED=SUMMED, AT_ONCE=PROGRAMS_AT_ONCE, num_warps=4,
    )  # fmt: skip
