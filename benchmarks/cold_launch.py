"""How a fused kernel can seem 96 times faster, and what it is: `python benchmarks/cold_launch.py`, on a CUDA device.

Two kernels (ReLU, then the product with a dropout mask) against one that does both, 50 * 2**20 floats. First as a hurried
benchmark does it: one launch of each, the unfused one first. The driver loads code when it is first used, and whoever comes
first pays for it. Then as it should be: warmed up, many launches, medians. docs/measuring.md tells the story.
"""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable

import torch
from cuda.core import Device, LaunchConfig, Program, ProgramOptions, launch

N, BLOCK, REPEATS = 50 * 2**20, 256, 50
SOURCE = """
extern "C" __global__ void relu(const float* x, float* y, unsigned n) {
  unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = fmaxf(x[i], 0.f);
}
extern "C" __global__ void dropout(const float* x, const float* mask, float* y, unsigned n) {
  unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i] * mask[i];
}
extern "C" __global__ void relu_dropout(const float* x, const float* mask, float* y, unsigned n) {
  unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = fmaxf(x[i], 0.f) * mask[i];
}
"""


def milliseconds(work: Callable[[], None]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def main() -> None:
    x = torch.randn(N, device="cuda")
    mask = (torch.rand(N, device="cuda") < 0.5).float() * 2
    between, unfused, fused = (torch.full_like(x, torch.nan) for _ in range(3))
    torch.cuda.synchronize()
    device = Device(torch.cuda.current_device())
    device.set_current()
    capability = "".join(map(str, torch.cuda.get_device_capability()))
    code = Program(SOURCE, "c++", ProgramOptions(arch=f"sm_{capability}")).compile("cubin")
    stream = device.create_stream(torch.cuda.current_stream())
    shape = LaunchConfig(grid=-(-N // BLOCK), block=BLOCK)

    def run(name: str, *tensors: torch.Tensor) -> None:
        launch(stream, shape, code.get_kernel(name), *(tensor.data_ptr() for tensor in tensors), ctypes.c_uint32(N))

    def two() -> None:
        run("relu", x, between)
        run("dropout", between, mask, unfused)

    def one() -> None:
        run("relu_dropout", x, mask, fused)

    cold = milliseconds(two), milliseconds(one)
    assert torch.equal(unfused, fused), "the fused kernel computes something else"
    warm = [(milliseconds(two), milliseconds(one)) for _ in range(REPEATS)]
    medians = [statistics.median(times) for times in zip(*warm, strict=True)]
    for words, (slow, fast) in (("one launch each, unfused first", cold), (f"median of {REPEATS}, warm", medians)):
        print(f"{words:<32} two kernels {slow:8.3f} ms   one {fast:7.3f} ms   ratio {slow / fast:6.1f}")


if __name__ == "__main__":
    main()
