"""How a fused kernel can seem 96 times faster, and what it really gains: `python benchmarks/cold_launch.py`, on a CUDA device.

Two kernels (ReLU, then the product with a dropout mask) against one that does both, on 50 * 2**20 floats. First as a hurried
benchmark does it: one launch of each, the unfused kernels first. The driver loads code when it is first used, so that the first
contender pays for it. Then as it should be done: warmed up, many launches, medians. See docs/measuring.md.

`--out benchmarks/results/cold-launch-CHIP-DATE.json` records it; `make readme` puts the newest recording into that page.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from cuda.core import Program, ProgramOptions

from onelaunch.bench.measure import give_lead
from onelaunch.bench.results import check_writable, provenance, save_results
from onelaunch.integers import ceil_div
from onelaunch.nvrtc.launch import LoadedKernel

N, BLOCK, REPEATS = 50 * 2**20, 256, 50
SOURCE = """
extern "C" __global__ void relu(const float* x, float* y, unsigned long long n) {
  unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = fmaxf(x[i], 0.f);
}
extern "C" __global__ void dropout(const float* x, const float* mask, float* y, unsigned long long n) {
  unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i] * mask[i];
}
extern "C" __global__ void relu_dropout(const float* x, const float* mask, float* y, unsigned long long n) {
  unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = fmaxf(x[i], 0.f) * mask[i];
}
"""


def seconds_of(work: Callable[[], None], *, hurried: bool) -> float:
    """Seconds by CUDA events. Unless hurried, the device sleeps first, so that the host's launch time does not count."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    if not hurried:
        give_lead()
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def measure() -> dict[str, dict[str, float]]:
    x = torch.randn(N, device="cuda")
    mask = (torch.rand(N, device="cuda") < 0.5).float() * 2
    between, unfused, fused = (torch.full_like(x, torch.nan) for _ in range(3))
    torch.cuda.synchronize()
    device = torch.device("cuda", torch.cuda.current_device())
    capability = "".join(map(str, torch.cuda.get_device_capability()))
    code = Program(SOURCE, "c++", ProgramOptions(arch=f"sm_{capability}")).compile("cubin")

    @functools.cache
    def kernel(name: str) -> LoadedKernel:  # loaded when it is first launched, like the kernels of a CUDA program
        return LoadedKernel(code, name, device)

    def run(name: str, *tensors: torch.Tensor) -> None:
        pointers = [tensor.data_ptr() for tensor in tensors]
        kernel(name).launch(torch.cuda.current_stream(), grid=ceil_div(N, BLOCK), block=BLOCK, args=[*pointers, N])

    def two() -> None:
        run("relu", x, between)
        run("dropout", between, mask, unfused)

    def one() -> None:
        run("relu_dropout", x, mask, fused)

    cold = seconds_of(two, hurried=True), seconds_of(one, hurried=True)
    assert torch.equal(unfused, fused), "the fused kernel has different results"
    warm = [(seconds_of(two, hurried=False), seconds_of(one, hurried=False)) for _ in range(REPEATS)]
    medians = [statistics.median(times) for times in zip(*warm, strict=True)]
    return {
        "one launch each, the unfused first": {"two_kernels": cold[0], "one_kernel": cold[1]},
        f"warmed up, medians of {REPEATS}": {"two_kernels": medians[0], "one_kernel": medians[1]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="One cold launch of each, then warm medians.")
    parser.add_argument("--out", type=Path, help="where to save the figures as JSON")
    out: Path | None = parser.parse_args().out
    if out is not None:
        check_writable(out)
    if not torch.cuda.is_available():
        sys.exit("error: this machine has no CUDA device that PyTorch can use: run it on one that has")
    found = measure()
    for words, one in found.items():
        slow, fast = 1e3 * one["two_kernels"], 1e3 * one["one_kernel"]
        print(f"{words:<36} two kernels {slow:8.3f} ms   one {fast:7.3f} ms   ratio {slow / fast:6.1f}")
    if out is not None:
        save_results({**provenance("python benchmarks/cold_launch.py"), "cold_launch": found}, out)


if __name__ == "__main__":
    main()
