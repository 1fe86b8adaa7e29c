"""Batch norm, layer norm and RMS norm with what is fused into them, against PyTorch eager, torch.compile and copies."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from onelaunch.bench.case import Trial
from onelaunch.bench.measure import cuda_device
from onelaunch.bench.op_trials import DTYPES, add_case, close, close_gradients, training_steps
from onelaunch.bench.rotation import input_sets, trial
from onelaunch.ops import batch_norm, layer_norm, rms_norm

NORMS = (
    ("layer_norm", 8192, 768, "bf16"),
    ("layer_norm", 8192, 768, "fp32"),
    ("rms_norm", 8192, 1024, "bf16"),
    ("rms_norm", 8192, 4096, "bf16"),
)  # op, rows, units, dtype: the norms of GPT-2, of a small Llama and of a large one


def _batch_norm(dtype: torch.dtype) -> Trial:
    cuda_device()
    m, c = 65536, 1024
    weight, bias = torch.rand(c, device="cuda", requires_grad=True), torch.randn(c, device="cuda", requires_grad=True)
    inputs = [[torch.randn(m, c, device="cuda", dtype=dtype, requires_grad=True), weight, bias] for _ in range(3)]
    dy, out = torch.randn(m, c, device="cuda", dtype=dtype), torch.empty(m, c, device="cuda", dtype=dtype)

    def ours(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return batch_norm(x, None, None, weight, bias, training=True, activation="relu", dropout=0.1)

    def plain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.dropout(F.relu(F.batch_norm(x, None, None, weight, bias, training=True)), 0.1)

    def check() -> None:
        got = [torch.randn(m, c, device="cuda", dtype=dtype).requires_grad_(), weight, bias]
        y = ours(*got)
        exact = [tensor.detach().double().requires_grad_() for tensor in got]
        z = F.batch_norm(exact[0], None, None, exact[1], exact[2], training=True)
        expected = torch.where((y.detach() != 0) | (z <= 0), F.relu(z) / 0.9, 0)
        close(y.detach(), expected.detach(), "output")
        upstream = torch.where(z.detach().abs() > 1e-4, dy, 0)  # nearer to zero, rounding may flip relu's derivative
        close_gradients((y, got), (expected, exact), upstream)

    def copy(index: int) -> None:
        for _ in range(4):
            out.copy_(inputs[index][0].detach())

    steps = {**training_steps(ours, plain, inputs, dy), "floor: eight passes": copy}
    return trial(steps, 3, check, moved=8 * m * c * dtype.itemsize, flops=20 * m * c, dtype=dtype)


def _norm(what: str, rows: int, units: int, dtype: torch.dtype) -> Trial:
    """Dropout of x (in layer norm's cases), the residual addition and the norm."""
    cuda_device()
    ours_norm, plain_norm, p = (layer_norm, F.layer_norm, 0.1) if what == "layer_norm" else (rms_norm, F.rms_norm, 0.0)
    size = rows * units * dtype.itemsize
    sets = input_sets(2 * size)
    dy, out = (torch.randn(rows, units, device="cuda", dtype=dtype) for _ in range(2))

    def made() -> list[torch.Tensor]:
        tensors = (torch.randn(shape, device="cuda", dtype=dtype) for shape in ((rows, units), (rows, units), (units,)))
        return [tensor.requires_grad_() for tensor in tensors]

    def ours(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = ours_norm(x, weight, residual=residual, dropout=p, eps=1e-5)
        return y

    def plain(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return plain_norm(F.dropout(x, p) + residual, (units,), weight, eps=1e-5)

    def check() -> None:
        got = made()
        y, s = ours_norm(got[0], got[2], residual=got[1], dropout=p, eps=1e-5, return_sum=True)
        kept = torch.autograd.grad(s, got[0], torch.ones_like(s), retain_graph=True)[0] != 0
        exact = [tensor.detach().double().requires_grad_() for tensor in got]
        expected = plain_norm(torch.where(kept, exact[0] / (1 - p), 0) + exact[1], (units,), exact[2], eps=1e-5)
        close(y.detach(), expected.detach(), "output")
        close_gradients((y, got), (expected, exact), dy, ("x", "residual", "weight"))

    # Forward x and the residual are read, the sum and y written; backward the sum and dy are read, dx and, where dropout makes
    # it another tensor, dresidual are written.
    passes = 8 if p else 7

    def copy(index: int) -> None:
        for _ in range(passes // 2):
            out.copy_(inputs[index][0].detach())

    inputs = [made() for _ in range(sets)]
    steps = {**training_steps(ours, plain, inputs, dy), f"floor: {passes // 2} copies": copy}
    return trial(steps, sets, check, moved=passes * size, flops=20 * rows * units, dtype=dtype)


for _label, _dtype in DTYPES.items():
    _about = f"batch norm + ReLU + dropout, 65536 x 1024, {_label}, forward and backward"
    add_case(f"ops/batch_norm-{_label}-training", _about, _batch_norm, _dtype)
for _what, _rows, _units, _label in NORMS:
    _parts = "dropout(0.1) + residual + layer norm" if _what == "layer_norm" else "residual + RMS norm"
    _about = f"{_parts}, {_rows} x {_units}, {_label}, forward and backward"
    add_case(f"ops/{_what}-{_rows}x{_units}-{_label}-training", _about, _norm, _what, _rows, _units, DTYPES[_label])
