"""A whole training step of a narrow MLP in two kernels: for widths up to 128 and batches of thousands of rows.

`narrow_step_kernel` loops over tiles of rows with all weights on chip: gather, forward, loss and backward. It sums the weight
gradients in registers over all tiles of a program, and activations never reach memory. Each program stores its sums once;
`split_k_update` adds them in a fixed order and takes the optimizer's step.

The parameters are stored in one fp32 vector, padded to powers of two: for each Linear its weights `[outputs, inputs]`, then
its bias. The padding is zero and stays zero: padded inputs and units are zero, and so are their gradients.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl

from onelaunch.engines.graph.kernels.output_layer import loss_and_gradient
from onelaunch.engines.graph.kernels.run_arguments import Clock, Rows, Targets
from onelaunch.engines.graph.kernels.run_state import (
    CORRECT,
    EPOCH_STEP,
    LABEL_SMOOTHING,
    as_features,
    derivative,
    gathered_rows,
    hyper,
    launch_step,
)
from onelaunch.kernels.dependent_launch import allow_next_kernel, wait_for_previous_kernel
from onelaunch.kernels.tiles import activate


@triton.jit
def load_weights(w_ptr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr):
    return tl.load(w_ptr + tl.arange(0, OUTPUTS)[:, None] * INPUTS + tl.arange(0, INPUTS)[None, :])


@triton.jit
def hidden(x, w, bias, UNITS: tl.constexpr, WIDTH: tl.constexpr, ACTIVATION: tl.constexpr, PRECISION: tl.constexpr):
    """(z, act(z) in the dtype of x) of one Linear; units from UNITS on are padding and give zero."""
    z = tl.dot(x, tl.trans(w), input_precision=PRECISION) + bias[None, :]
    h = activate(z, ACTIVATION)
    if UNITS != WIDTH:
        h = tl.where((tl.arange(0, WIDTH) < UNITS)[None, :], h, 0.0)
    return z, h.to(x.dtype)


@triton.jit
def backward(
    g, x, w, saved, dw, db, UNITS: tl.constexpr, WIDTH: tl.constexpr, ACTIVATION: tl.constexpr, FROM_Z: tl.constexpr,
    BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The backward pass of a Linear with output gradient g: (the gradient before the activation that made x, dw and db with
    this tile's contribution added)."""
    dw = tl.dot(tl.trans(g), x, dw, input_precision=PRECISION)
    if BIAS:
        db += tl.sum(g.to(tl.float32), axis=0)
    dx = tl.dot(g, w, input_precision=PRECISION) * derivative(saved, 1.0, ACTIVATION, FROM_Z)
    if UNITS != WIDTH:
        dx = tl.where((tl.arange(0, WIDTH) < UNITS)[None, :], dx, 0.0)
    return dx.to(x.dtype), dw, db


@triton.jit
def store_sums(parts_ptr, dw, db, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr):
    tl.store(parts_ptr + tl.arange(0, OUTPUTS)[:, None] * INPUTS + tl.arange(0, INPUTS)[None, :], dw)
    tl.store(parts_ptr + OUTPUTS * INPUTS + tl.arange(0, OUTPUTS), db)


@triton.jit(do_not_specialize=["step"])
def narrow_step_kernel(
    x_ptr,
    order_ptr,
    target_ptr,
    weight_ptr,
    w_ptr,
    master_ptr,
    parts_ptr,
    loss_parts_ptr,
    control_ptr,
    table_ptr,
    step: tl.int32,
    batch,
    inputs,
    outputs,
    ROWS: tl.constexpr,
    LINEARS: tl.constexpr,
    IN: tl.constexpr,
    UNITS_1: tl.constexpr,
    UNITS_2: tl.constexpr,
    UNITS_3: tl.constexpr,
    WIDTH_1: tl.constexpr,
    WIDTH_2: tl.constexpr,
    WIDTH_3: tl.constexpr,
    OUT: tl.constexpr,
    LOSS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    FROM_Z: tl.constexpr,
    BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """UNITS are the hidden widths; WIDTH, IN and OUT are padded widths. Those past the last hidden layer are not used."""
    wait_for_previous_kernel(OVERLAP)
    index = tl.load(control_ptr + EPOCH_STEP) + step
    # Offset of each Linear: its weights, then its bias. LAST is the padded input width of the last one.
    START_2: tl.constexpr = WIDTH_1 * (IN + 1)
    START_3: tl.constexpr = START_2 + (WIDTH_2 * (WIDTH_1 + 1) if LINEARS > 2 else 0)
    START_4: tl.constexpr = START_3 + (WIDTH_3 * (WIDTH_2 + 1) if LINEARS > 3 else 0)
    LAST: tl.constexpr = WIDTH_3 if LINEARS > 3 else (WIDTH_2 if LINEARS > 2 else WIDTH_1)
    TOTAL: tl.constexpr = START_4 + OUT * (LAST + 1)

    w1 = load_weights(w_ptr, WIDTH_1, IN)
    b1 = tl.load(master_ptr + WIDTH_1 * IN + tl.arange(0, WIDTH_1))
    dw1 = tl.zeros((WIDTH_1, IN), tl.float32)
    db1 = tl.zeros((WIDTH_1,), tl.float32)
    if LINEARS > 2:
        w2 = load_weights(w_ptr + START_2, WIDTH_2, WIDTH_1)
        b2 = tl.load(master_ptr + START_2 + WIDTH_2 * WIDTH_1 + tl.arange(0, WIDTH_2))
        dw2 = tl.zeros((WIDTH_2, WIDTH_1), tl.float32)
        db2 = tl.zeros((WIDTH_2,), tl.float32)
    if LINEARS > 3:
        w3 = load_weights(w_ptr + START_3, WIDTH_3, WIDTH_2)
        b3 = tl.load(master_ptr + START_3 + WIDTH_3 * WIDTH_2 + tl.arange(0, WIDTH_3))
        dw3 = tl.zeros((WIDTH_3, WIDTH_2), tl.float32)
        db3 = tl.zeros((WIDTH_3,), tl.float32)
    w_out = load_weights(w_ptr + START_4, OUT, LAST)
    b_out = tl.load(master_ptr + START_4 + OUT * LAST + tl.arange(0, OUT))
    dw_out = tl.zeros((OUT, LAST), tl.float32)
    db_out = tl.zeros((OUT,), tl.float32)

    column = tl.arange(0, IN)
    losses = tl.zeros((ROWS,), tl.float32)
    correct_rows = tl.zeros((ROWS,), tl.int64)
    for tile in range(tl.program_id(0), tl.cdiv(batch, ROWS), tl.num_programs(0)):
        row = tile * ROWS + tl.arange(0, ROWS)
        source, taken = gathered_rows(order_ptr, table_ptr, index, row, batch)
        inside = taken[:, None] & (column < inputs)[None, :]
        x = as_features(tl.load(x_ptr + source[:, None] * inputs + column[None, :], mask=inside, other=0), w1.dtype)
        z1, h1 = hidden(x, w1, b1, UNITS_1, WIDTH_1, ACTIVATION, PRECISION)
        last = h1
        if LINEARS > 2:
            z2, h2 = hidden(h1, w2, b2, UNITS_2, WIDTH_2, ACTIVATION, PRECISION)
            last = h2
        if LINEARS > 3:
            z3, h3 = hidden(h2, w3, b3, UNITS_3, WIDTH_3, ACTIVATION, PRECISION)
            last = h3
        logits = tl.dot(last, tl.trans(w_out), input_precision=PRECISION) + b_out[None, :]
        loss, gradient, correct = loss_and_gradient(
            logits, target_ptr, weight_ptr, source, taken, outputs, hyper(table_ptr, LABEL_SMOOTHING), OUT, LOSS
        )
        losses += loss  # summed over rows only once, after the last tile: a sum across warps is a barrier
        correct_rows += correct
        g = gradient.to(x.dtype)
        if LINEARS > 3:
            saved = z3 if FROM_Z else h3
            g, dw_out, db_out = backward(
                g, h3, w_out, saved, dw_out, db_out, UNITS_3, WIDTH_3, ACTIVATION, FROM_Z, BIAS, PRECISION
            )  # fmt: skip
            saved = z2 if FROM_Z else h2
            g, dw3, db3 = backward(g, h2, w3, saved, dw3, db3, UNITS_2, WIDTH_2, ACTIVATION, FROM_Z, BIAS, PRECISION)
            saved = z1 if FROM_Z else h1
            g, dw2, db2 = backward(g, h1, w2, saved, dw2, db2, UNITS_1, WIDTH_1, ACTIVATION, FROM_Z, BIAS, PRECISION)
        elif LINEARS > 2:
            saved = z2 if FROM_Z else h2
            g, dw_out, db_out = backward(
                g, h2, w_out, saved, dw_out, db_out, UNITS_2, WIDTH_2, ACTIVATION, FROM_Z, BIAS, PRECISION
            )  # fmt: skip
            saved = z1 if FROM_Z else h1
            g, dw2, db2 = backward(g, h1, w2, saved, dw2, db2, UNITS_1, WIDTH_1, ACTIVATION, FROM_Z, BIAS, PRECISION)
        else:
            saved = z1 if FROM_Z else h1
            g, dw_out, db_out = backward(
                g, h1, w_out, saved, dw_out, db_out, UNITS_1, WIDTH_1, ACTIVATION, FROM_Z, BIAS, PRECISION
            )  # fmt: skip
        dw1 = tl.dot(tl.trans(g), x, dw1, input_precision=PRECISION)
        if BIAS:
            db1 += tl.sum(g.to(tl.float32), axis=0)

    allow_next_kernel(OVERLAP)
    parts_ptr += tl.program_id(0) * TOTAL
    store_sums(parts_ptr, dw1, db1, WIDTH_1, IN)
    if LINEARS > 2:
        store_sums(parts_ptr + START_2, dw2, db2, WIDTH_2, WIDTH_1)
    if LINEARS > 3:
        store_sums(parts_ptr + START_3, dw3, db3, WIDTH_3, WIDTH_2)
    store_sums(parts_ptr + START_4, dw_out, db_out, OUT, LAST)
    tl.store(loss_parts_ptr + tl.program_id(0), tl.sum(losses, axis=0))
    if LOSS != "mse":
        tl.atomic_add(
            control_ptr + CORRECT, tl.sum(correct_rows, axis=0), sem="relaxed"
        )  # integer sums do not depend on the order


def narrow_step(
    x: Rows, target: Targets, weights: torch.Tensor, masters: torch.Tensor, parts: torch.Tensor,
    loss_parts: torch.Tensor, clock: Clock, *, batch: int, units: tuple[int, ...], widths: tuple[int, ...], loss: str,
    activation: str | None, saves_input: bool, bias: bool, rows: int, warps: int, tf32: bool,
) -> None:  # fmt: skip
    """Fills one line of `parts` and one element of `loss_parts` per program.

    `units` and `widths` go from inputs to outputs, without and with padding; `weights` are the masters in the dtype of the
    products.
    """
    hidden_units = (*units[1:-1], 0, 0)[:3]
    hidden_widths = (*widths[1:-1], 1, 1)[:3]
    launch_step(
        clock,
        narrow_step_kernel,
        (len(parts),),
        (x.values, x.order, *target, weights, masters, parts, loss_parts, clock.control, clock.table),
        (clock.step,),
        (batch, units[0], units[-1]),
        (
            rows, len(units) - 1, widths[0], *hidden_units, *hidden_widths, widths[-1], loss, activation, saves_input,
            bias, "tf32" if tf32 else "ieee",
        ),
        num_warps=warps,
        num_stages=3,  # the next tile's rows are loaded while this one is computed
    )  # fmt: skip
