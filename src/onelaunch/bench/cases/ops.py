"""The fused ops against PyTorch eager, torch.compile, cuBLASLt's epilogue, and a copy of the bytes that must move.

They are called over rotating inputs (rotation.py), except for the Python time of a call, which is taken at one tiny input.
The norms have a file of their own, `norms.py`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F

from onelaunch.activations import activate
from onelaunch.bench.case import Trial, Work, case
from onelaunch.bench.measure import cuda_device
from onelaunch.bench.op_trials import DTYPES, add_case, close, close_gradients, training_steps
from onelaunch.bench.rotation import Step, forward_step, input_sets, training_step, trial
from onelaunch.ops import batch_norm, cross_entropy, layer_norm, linear, linear_cross_entropy, relu_dropout

LINEAR_SHAPES = ((8192, 4096, 4096), (4096, 1024, 4096), (1024, 1024, 1024), (128, 784, 784), (32, 784, 128))  # m, k, n
LOGITS = (
    (8192, 32768, "bf16"),
    (65536, 10, "fp32"),
    (32768, 1000, "bf16"),
    (8192, 50257, "bf16"),
)  # rows, classes, dtype
HEADS = (
    (8192, 768, 50257),
    (8192, 1024, 32000),
)  # rows, features, classes: the last layers of GPT-2 and of a small Llama
BURSTS, CALLS = 5, 200  # calls per burst, for the Python time of an op at tiny size


def _relu_dropout(dtype: torch.dtype, backward: bool) -> Trial:
    cuda_device()
    n = 50 * 2**20
    inputs = [[torch.randn(n, device="cuda", dtype=dtype, requires_grad=backward)] for _ in range(3)]
    dy, out = torch.randn(n, device="cuda", dtype=dtype), torch.empty(n, device="cuda", dtype=dtype)

    def plain(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(F.relu(x), 0.5)

    def check() -> None:
        x = torch.randn(n, device="cuda", dtype=dtype, requires_grad=True)
        y = relu_dropout(x, 0.5)
        kept = y.detach() != 0
        close(y.detach(), torch.where(kept, x.detach().double() * 2, 0), "output")
        (dx,) = torch.autograd.grad(y, x, dy)
        close(dx, torch.where(kept, dy.double() * 2, 0), "gradient")
        assert abs(kept.double().mean().item() - 0.25) < 1e-3

    def copy(index: int) -> None:
        for _ in range(2 if backward else 1):
            out.copy_(inputs[index][0].detach())

    functions: dict[str, Callable[..., torch.Tensor]] = {
        "onelaunch": lambda x: relu_dropout(x, 0.5), "torch eager": plain, "torch.compile": torch.compile(plain)
    }  # fmt: skip
    steps: dict[str, Step] = {
        name: training_step(function, inputs, dy) if backward else forward_step(function, inputs)
        for name, function in functions.items()
    }
    steps["floor: two copies" if backward else "floor: copy"] = copy
    passes = 4 if backward else 2
    return trial(steps, 3, check, in_graph=backward, moved=passes * n * dtype.itemsize, flops=passes * n, dtype=dtype)


def _linear_bytes(m: int, k: int, n: int) -> int:
    """Bytes of x, w and y in bf16."""
    return 2 * (m * k + k * n + m * n)


def _linear_inputs(m: int, k: int, n: int, gradients: bool) -> list[list[torch.Tensor]]:
    def one() -> list[torch.Tensor]:
        made = [
            torch.randn(m, k, device="cuda", dtype=torch.bfloat16),
            torch.randn(n, k, device="cuda", dtype=torch.bfloat16) / k**0.5,
            torch.randn(n, device="cuda", dtype=torch.bfloat16),
        ]
        return [tensor.requires_grad_(gradients) for tensor in made]

    return [one() for _ in range(input_sets(_linear_bytes(m, k, n)))]


def _check_linear(m: int, k: int, n: int, activation: str, p: float) -> None:
    got = [tensor.requires_grad_() for tensor in _linear_inputs(m, k, n, True)[0]]
    y = linear(*got, activation=activation, dropout=p)
    exact = [tensor.detach().double().requires_grad_() for tensor in got]
    z = F.linear(*exact)
    expected = activate(z, activation)
    if p:
        expected = torch.where((y.detach() != 0) | (z <= 0), expected / (1 - p), 0)
    close(y.detach(), expected.detach(), "output")
    dy = torch.where(
        z.detach().abs() > 2e-2, torch.randn_like(y), 0
    )  # nearer to zero, rounding may flip relu's derivative
    close_gradients((y, got), (expected, exact), dy)


def _linear_forward(m: int, k: int, n: int, activation: str) -> Trial:
    cuda_device()
    inputs = _linear_inputs(m, k, n, False)
    linear(*inputs[0], activation=activation)  # chooses the implementation, which cannot be done during a capture

    def plain(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return activate(F.linear(x, w, b), activation)

    compiled = torch.compile(plain)
    steps: dict[str, Step] = {
        "onelaunch": lambda index: linear(*inputs[index], activation=activation),
        "torch eager": lambda index: plain(*inputs[index]),
        "torch.compile": lambda index: compiled(*inputs[index]),
        "floor: bare GEMM": lambda index: inputs[index][0] @ inputs[index][1].t(),
    }
    if activation in ("relu", "gelu_tanh"):
        gelu = activation == "gelu_tanh"
        steps["cuBLASLt epilogue"] = lambda index: torch._addmm_activation(
            inputs[index][2], inputs[index][0], inputs[index][1].t(), use_gelu=gelu
        )
    return trial(
        steps, len(inputs), lambda: _check_linear(m, k, n, activation, 0.0), moved=_linear_bytes(m, k, n),
        flops=2 * m * k * n,
    )  # fmt: skip


def _linear_training(m: int, k: int, n: int) -> Trial:
    cuda_device()
    inputs = _linear_inputs(m, k, n, True)
    dy = torch.randn(m, n, device="cuda", dtype=torch.bfloat16)
    linear(*inputs[0], activation="relu", dropout=0.1)

    def plain(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.dropout(F.relu(F.linear(x, w, b)), 0.1)

    def ours(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return linear(x, w, b, activation="relu", dropout=0.1)

    steps = training_steps(ours, plain, inputs, dy)
    # Backward reads x, w and dy, and writes dx and dw.
    moved = 2 * _linear_bytes(m, k, n) + 2 * (m * k + k * n)
    made = trial(
        steps, len(inputs), lambda: _check_linear(m, k, n, "relu", 0.1), moved=moved, flops=6 * m * k * n
    )  # fmt: skip
    return replace(made, absent={"cuBLASLt epilogue": "torch._addmm_activation has no derivative in PyTorch"})


def _cross_entropy(rows: int, classes: int, dtype: torch.dtype) -> Trial:
    cuda_device()
    sets = input_sets(2 * rows * classes * dtype.itemsize)
    inputs = [[torch.randn(rows, classes, device="cuda", dtype=dtype, requires_grad=True)] for _ in range(sets)]
    target = torch.randint(classes, (rows,), device="cuda")
    out, one = torch.empty(rows, classes, device="cuda", dtype=dtype), torch.ones((), device="cuda", dtype=dtype)

    def check() -> None:
        logits = torch.randn(rows, classes, device="cuda", dtype=dtype, requires_grad=True)
        loss = cross_entropy(logits, target)
        exact = logits.detach().double().requires_grad_()
        expected = F.cross_entropy(exact, target)
        close(loss.detach(), expected.detach(), "loss")
        (dx,) = torch.autograd.grad(loss, logits)
        close(dx, torch.autograd.grad(expected, exact)[0], "gradient")

    def plain(logits: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits, target)

    steps = {
        **training_steps(lambda logits: cross_entropy(logits, target), plain, inputs, one),
        # Not copy_: at this size it uses the copy engine, which takes 1.6 times as long as a kernel that reads and writes.
        "floor: one pass": lambda index: torch.mul(inputs[index][0].detach(), 1.0, out=out),
    }
    moved = 2 * rows * classes * dtype.itemsize
    return trial(steps, sets, check, moved=moved, flops=5 * rows * classes, dtype=dtype)


def _linear_cross_entropy(rows: int, features: int, classes: int) -> Trial:
    cuda_device()
    weights = classes * features
    sets = input_sets(2 * (rows * features + weights))
    target = torch.randint(classes, (rows,), device="cuda")

    def made() -> list[torch.Tensor]:
        x = torch.randn(rows, features, device="cuda", dtype=torch.bfloat16)
        weight = torch.randn(classes, features, device="cuda", dtype=torch.bfloat16) / features**0.5
        return [x.requires_grad_(), weight.requires_grad_()]

    def ours(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(x, weight, target)

    def plain(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.linear(x, weight), target).float()

    def check() -> None:
        got = made()
        exact = [tensor.detach().double().requires_grad_() for tensor in got]
        loss, expected = ours(*got), F.cross_entropy(F.linear(*exact), target)
        close(loss.detach().bfloat16(), expected.detach(), "loss")
        pairs = zip(torch.autograd.grad(loss, got), torch.autograd.grad(expected, exact), strict=True)
        for what, (mine, other) in zip(("x", "weight"), pairs, strict=True):
            close(mine, other, f"gradient of {what}")

    inputs = [made() for _ in range(sets)]
    steps = training_steps(ours, plain, inputs, torch.ones((), device="cuda"))
    moved = 2 * 2 * (rows * features + weights)  # x and weight are read, their gradients written
    return trial(steps, sets, check, moved=moved, flops=6 * rows * weights)


def _python_time(function: Callable[[], object]) -> Work:
    """Seconds per call on the host; the device, with next to nothing to do, keeps up. It is the median of several bursts, so
    that a moment in which the host did something else does not count."""

    def work() -> float:
        bursts = []
        for _ in range(BURSTS):
            begin = time.perf_counter()
            for _ in range(CALLS):
                function()
            bursts.append(time.perf_counter() - begin)
        return statistics.median(bursts) / CALLS

    return work


def _call(ours: Callable[[], torch.Tensor], plain: Callable[[], torch.Tensor], undropped: torch.Tensor) -> Trial:
    def check() -> None:
        y = ours().detach()
        kept = y != 0
        assert kept.any(), "nothing was kept"
        torch.testing.assert_close(y[kept], undropped[kept], rtol=1e-4, atol=1e-5)

    return Trial(_python_time(ours), check, {"torch eager": _python_time(plain)}, self_timed=True)


def _register() -> None:
    for label, dtype in DTYPES.items():
        for suffix, backward in (("forward", False), ("training", True)):
            about = f"ReLU + dropout of 50 * 2**20 elements, {label}, {suffix}"
            add_case(f"ops/relu_dropout-{label}-{suffix}", about, _relu_dropout, dtype, backward)
    for m, k, n in LINEAR_SHAPES:
        for activation in ("relu", "sigmoid", "gelu_tanh", "silu"):
            about = f"linear + {activation}, bf16, forward"
            add_case(f"ops/linear-{activation}-{m}x{k}x{n}", about, _linear_forward, m, k, n, activation)
        about = "linear + ReLU + dropout(0.1), bf16, forward and backward"
        add_case(f"ops/linear-relu-dropout-{m}x{k}x{n}-training", about, _linear_training, m, k, n)
    for rows, classes, label in LOGITS:
        about = f"cross-entropy of {rows} x {classes}, {label}, forward and backward"
        add_case(f"ops/cross_entropy-{rows}x{classes}-{label}", about, _cross_entropy, rows, classes, DTYPES[label])
    for rows, features, classes in HEADS:
        about = f"linear {features} to {classes} + cross-entropy of {rows} rows, bf16, forward and backward"
        name = f"ops/linear_cross_entropy-{rows}x{features}x{classes}"
        add_case(name, about, _linear_cross_entropy, rows, features, classes)


def _tiny(what: str) -> Callable[[], Trial]:
    def setup() -> Trial:
        cuda_device()
        x = torch.randn(32, 64, device="cuda", requires_grad=True)
        w, b = (
            torch.randn(64, 64, device="cuda", requires_grad=True),
            torch.randn(64, device="cuda", requires_grad=True),
        )
        target = torch.randint(64, (32,), device="cuda")
        mean, var = torch.zeros(64, device="cuda"), torch.ones(64, device="cuda")
        z = F.linear(x, w, b)
        normal = F.batch_norm(x, None, None, b, b, training=True)
        functions: dict[str, tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor], torch.Tensor]] = {
            "relu_dropout": (lambda: relu_dropout(x, 0.5), lambda: F.dropout(F.relu(x), 0.5), 2 * F.relu(x)),
            "linear": (
                lambda: linear(x, w, b, activation="relu", dropout=0.1),
                lambda: F.dropout(F.relu(F.linear(x, w, b)), 0.1),
                F.relu(z) / 0.9,
            ),
            "batch_norm": (
                lambda: batch_norm(x, mean, var, b, b, training=True, activation="relu", dropout=0.1),
                lambda: F.dropout(F.relu(F.batch_norm(x, mean, var, b, b, training=True)), 0.1),
                F.relu(normal) / 0.9,
            ),
            "layer_norm": (
                lambda: layer_norm(x, b, b, residual=x),
                lambda: F.layer_norm(x + x, (64,), b, b),
                F.layer_norm(x + x, (64,), b, b),
            ),
            "cross_entropy": (
                lambda: cross_entropy(x, target), lambda: F.cross_entropy(x, target), F.cross_entropy(x, target)
            ),
        }  # fmt: skip
        ours, plain, undropped = functions[what]
        return _call(ours, plain, undropped.detach())

    return setup


_register()
for _what in ("relu_dropout", "linear", "batch_norm", "layer_norm", "cross_entropy"):
    case(f"ops/call-{_what}", "ops", f"Python time of one {_what} call at tiny size, forward", "call")(_tiny(_what))
