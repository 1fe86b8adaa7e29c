"""Compile every kernel without a GPU: `python compile_all.py 90 [bfloat16]` prints what it compiled for compute capability 9.0.

The launchers run as usual on CPU tensors, but instead of a launch the kernel is compiled for exactly these arguments.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from typing import Any

import torch
import triton
import triton.language as tl
from triton import compile as triton_compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from onelaunch.activations import ACTIVATIONS
from onelaunch.integers import ceil_div
from onelaunch.kernels import (
    activation_dropout,
    argument_ring,
    batch_norm,
    batch_norm_backward,
    cross_entropy,
    cross_entropy_backward,
    cross_entropy_long,
    dependent_launch,
    linear,
    mlp,
    norm,
    norm_backward,
    optimizers,
    relu_dropout,
)
from onelaunch.kernels.batch_norm_tiles import Layout
from onelaunch.kernels.dropout_key import DropoutKey
from onelaunch.kernels.mlp_shape import Shape
from onelaunch.kernels.tiles import activate, activation_gradient, activation_gradient_from_output

TYPES = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.uint8: "*u8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


WITHOUT_WGMMA = (mlp.mlp_forward_kernel, mlp.mlp_backward_kernel)  # Triton 3.6 computed wrong sums with it
MODULES = (
    activation_dropout, argument_ring, batch_norm, batch_norm_backward, cross_entropy, cross_entropy_backward,
    cross_entropy_long, linear, norm, norm_backward, optimizers, relu_dropout,
)  # fmt: skip


class Compiler:
    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)
        self.done: list[str] = []

    def __call__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        tensors: tuple[torch.Tensor | TensorDescriptor | None, ...],
        values: tuple[int | float, ...],
        sizes: tuple[int, ...],
        constants: tuple[Any, ...],
        *,
        num_warps: int = 4,
        num_stages: int = 3,
        launch_pdl: bool = False,
    ) -> None:
        signature: dict[str, str] = {}
        constexprs: dict[tuple[int], Any] = {}
        attributes: dict[tuple[int], Any] = {}
        arguments = (*tensors, *values, *sizes, *constants)
        for index, (name, argument) in enumerate(zip(kernel.arg_names, arguments, strict=True)):
            first_constant = len(arguments) - len(constants)
            if argument is None or index >= first_constant or (type(argument) is int and argument == 1):
                signature[name] = "constexpr"
                constexprs[(index,)] = argument
            elif isinstance(argument, torch.Tensor):
                signature[name] = TYPES[argument.dtype]
                attributes[(index,)] = [["tt.divisibility", 16]]
            elif isinstance(argument, TensorDescriptor):
                signature[name] = f"tensordesc<{TYPES[argument.base.dtype][1:]}{argument.block_shape}>"
            elif isinstance(argument, float):
                signature[name] = "fp32"
            else:
                signature[name] = "i64" if name in ("seed", "offset") else "i32"
                if argument % 16 == 0 and index >= len(tensors) + len(values):
                    attributes[(index,)] = [["tt.divisibility", 16]]
        options = {"num_warps": num_warps, "num_stages": num_stages, "launch_pdl": launch_pdl}
        self.compile(kernel, signature, constexprs, attributes, options)

    def call(
        self, kernel: Any, grid: tuple[int, ...], *arguments: Any, num_warps: int, num_stages: int = 3, **constants: Any
    ) -> None:
        """In place of `onelaunch.kernels.launch.call`, whose tensors may be in tuples; integers may have any value."""
        signature: dict[str, Any] = {}
        constexprs: dict[tuple[int, ...], Any] = {}
        attributes: dict[tuple[int, ...], Any] = {}

        def kind(argument: Any, path: tuple[int, ...]) -> Any:
            if isinstance(argument, tuple):
                return tuple(kind(one, (*path, index)) for index, one in enumerate(argument))
            if isinstance(argument, torch.Tensor):
                attributes[path] = [["tt.divisibility", 16]]
                return TYPES[argument.dtype]
            if argument is None:
                constexprs[path] = None
                return "constexpr"
            return "i32"

        for index, name in enumerate(kernel.arg_names):
            if name in constants:
                signature[name], constexprs[(index,)] = "constexpr", constants[name]
            else:
                signature[name] = kind(arguments[index], (index,))
        self.compile(kernel, signature, constexprs, attributes, {"num_warps": num_warps, "num_stages": num_stages})

    def compile(
        self, kernel: Any, signature: dict[str, Any], constexprs: dict[Any, Any], attributes: dict[Any, Any],
        options: dict[str, Any],
    ) -> None:  # fmt: skip
        source = ASTSource(kernel, signature, constexprs, attributes)
        num_warps = options["num_warps"]
        compiled = triton_compile(source, target=self.target, options=options)
        assert compiled.asm["cubin"]
        shuffles = compiled.asm["ptx"].count("shfl.sync")
        self.done.append(f"{kernel.__name__} shared={compiled.metadata.shared} warps={num_warps} shuffles={shuffles}")
        assert kernel not in WITHOUT_WGMMA or "wgmma" not in compiled.asm["ptx"]


def run_launchers(dtype: torch.dtype) -> None:
    key = DropoutKey(None, 3, 4)
    in_memory = DropoutKey(torch.zeros(2, dtype=torch.int64), 0, 0)
    x, y = torch.empty(64, 256, dtype=dtype), torch.empty(64, 256, dtype=dtype)
    keep = torch.empty(64, 32, dtype=torch.uint8)
    for one in (key, in_memory):
        relu_dropout.relu_dropout_forward(x, y, keep, 0.5, one)
    relu_dropout.relu_dropout_backward(x, keep, y, 0.5)

    bias, dbias = torch.empty(256, dtype=dtype), torch.empty(256, dtype=dtype)
    for activation in ("relu", "gelu"):
        activation_dropout.activation_dropout_forward(x, bias, y, keep, activation=activation, p=0.5, key=key)
        from_output = activation == "relu"
        activation_dropout.activation_dropout_backward(
            x, y, keep, y, dbias, activation=activation, from_output=from_output, p=0.5
        )
    many = torch.empty(512, 256, dtype=dtype)  # a second kernel adds its column sums
    activation_dropout.activation_dropout_backward(
        many, many, None, many, dbias, activation="silu", from_output=False, p=0.0
    )
    w = torch.empty(256, 256, dtype=dtype)
    tile = linear.GemmTile(64, 128, 32, 4, 3)
    for p, bits in ((0.0, None), (0.5, keep)):
        linear.linear_forward(x, w, bias, y, None, bits, activation="silu", p=p, key=key, tile=tile, tf32=True)

    weight = torch.empty(256)
    statistics, sums = torch.empty(3, 256), torch.empty(2, 256)
    for layout in (Layout(64, 256, 0), Layout(2, 32, 256)):
        bits = torch.empty(layout.lines, ceil_div(layout.inner, 8), dtype=torch.uint8)
        batch_norm.batch_statistics(x, layout, statistics, weight, weight, momentum=0.1, eps=1e-5)
        batch_norm.normalise(x, layout, statistics, weight, weight, y, bits, activation="relu", p=0.5, key=key)
        for training in (True, False):
            batch_norm_backward.batch_norm_backward(
                x, x, layout, bits, statistics, weight, weight, y, sums,
                training=training, activation="relu", p=0.5,
            )  # fmt: skip

    table, chunks = torch.empty(4, optimizers.COLUMNS, dtype=torch.int64), torch.empty(9, 2, dtype=torch.int32)
    rules = (
        ("adam", (False, True)),
        ("adam", (True, False)),
        ("sgd", (False, False, False)),
        ("sgd", (True, True, True)),
    )
    for rule, options in rules:
        settings = torch.empty(4, dtype=torch.float64)
        optimizers.update(rule, options, table, chunks, settings, torch.empty(()), 9, dtype)
    argument_ring.copy_arguments(table, table[0], table, x.element_size(), 5000)
    argument_ring.write_loss(x[0, 0], table[0])

    for units, centered in ((256, True), (8192, True), (768, False)):
        matrix, weight = torch.empty(64, units, dtype=dtype), torch.empty(units, dtype=dtype)
        bits, statistics = torch.empty(64, units // 8, dtype=torch.uint8), torch.empty(1 + centered, 64)
        for p, kept in ((0.0, None), (0.5, bits)):
            norm.norm_forward(
                matrix,
                matrix,
                weight,
                weight,
                matrix,
                matrix,
                statistics,
                kept,
                eps=1e-5,
                p=p,
                key=key,
                centered=centered,
            )
            norm_backward.norm_backward(
                matrix, matrix, matrix, statistics, weight, kept, matrix, matrix, torch.empty(1 + centered, units, dtype=dtype),
                p=p, centered=centered,
            )  # fmt: skip

    target = torch.empty(2048, dtype=torch.int64)
    loss, count, lse = torch.empty(()), torch.empty(()), torch.empty(2048, 2)
    for rows, classes in ((64, 10), (2048, 10), (2048, 32), (64, 256), (64, 257), (64, 100_000), (64, 50_257)):
        logits = torch.empty(rows, classes, dtype=dtype)
        dx = torch.empty_like(logits) if classes != 100_000 else None
        cross_entropy.cross_entropy_forward(
            logits, target, loss, lse=lse, dx=dx, smoothing=0.1, ignore_index=-100, reduction="mean"
        )
    cross_entropy.count_rows(target, -100, torch.empty(4))
    cross_entropy_backward.rescale(x, loss, count, x, 64)
    for one in (x, torch.empty(64, 257, dtype=dtype)):
        cross_entropy_backward.cross_entropy_gradient(
            one, target, lse, loss, count, torch.empty_like(one), smoothing=0.1, ignore_index=-100
        )


def run_mlp(dtype: torch.dtype) -> None:
    for widths, rows in (((8, 64, 64, 4), 256), ((33, 128, 128, 1), 16384), ((7, 256, 3), 100)):
        for activation in ("relu", "gelu"):
            shape = Shape(widths, (True, *[False] * (len(widths) - 2)))
            weights = [torch.empty(b, a, dtype=dtype) for a, b in pairwise(widths)]
            biases = [weights[0][:, 0], *[None] * (len(weights) - 1)]
            x, y, saved = (torch.empty(rows, width, dtype=dtype) for width in (widths[0], widths[-1], shape.hidden[-1]))
            mlp.mlp_forward(x, weights, biases, saved, y, shape, activation=activation, tf32=False)
            gradients = x.new_empty(shape.gradients[-1])
            for dx in (None, x):
                mlp.mlp_backward(y, x, weights, saved, dx, gradients, shape, activation=activation, tf32=False)


def compile_tma(compiler: Compiler, dtype: torch.dtype) -> None:
    """Compile the one kernel whose launcher queries the device (for its multiprocessors), for the arguments it would get."""
    x = torch.empty(256, 256, dtype=dtype)
    tile = linear.GemmTile(128, 128, 64, 8, 3)
    tiles = [TensorDescriptor.from_tensor(x, [tile.m, side]) for side in (tile.k, tile.k, tile.n)]
    keep = torch.empty(256, 32, dtype=torch.uint8)
    for activation, z, bits in ((None, None, None), ("gelu", x, keep)):
        tensors = (tiles[0], tiles[1], x[0], tiles[2], z, bits, None)
        constants = (tile.m, tile.n, tile.k, 8, activation, "tf32", True)
        options = {"num_warps": tile.warps, "num_stages": tile.stages, "launch_pdl": True}
        compiler(linear.linear_tma_kernel, (4,), tensors, (3, 4, 5, 2.0), (256, 256, 256), constants, **options)


@triton.jit
def activation_kernel(z_ptr, y_ptr, slope_ptr, ACTIVATION: tl.constexpr, FROM_OUTPUT: tl.constexpr):
    lane = tl.arange(0, 128)
    z = tl.load(z_ptr + lane)
    y = activate(z, ACTIVATION)
    tl.store(y_ptr + lane, y)
    if FROM_OUTPUT:
        slope = activation_gradient_from_output(y, ACTIVATION)
    else:
        slope = activation_gradient(z, ACTIVATION)
    tl.store(slope_ptr + lane, slope)


def compile_activations(compiler: Compiler) -> None:
    z = torch.empty(128)
    for name, entry in ACTIVATIONS.items():
        compiler(activation_kernel, (1,), (z, z, z), (), (), (name, not entry.saves_input))


def main() -> None:
    compiler = Compiler(int(sys.argv[1]))
    dependent_launch.overlaps_on = lambda device: compiler.target.arch >= 90  # instead of a query of the device
    for module in MODULES:
        module.launch = compiler  # type: ignore[attr-defined]
    dtype = getattr(torch, sys.argv[2] if len(sys.argv) > 2 else "bfloat16")
    mlp.call = compiler.call  # type: ignore[attr-defined]
    run_launchers(dtype)
    run_mlp(dtype)
    if compiler.target.arch >= 90:
        compile_tma(compiler, dtype)
    if compiler.target.arch == 90:  # the other chips have the same instructions for them
        compile_activations(compiler)
    print("\n".join(compiler.done))


if __name__ == "__main__":
    main()
