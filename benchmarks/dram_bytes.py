"""The bytes and launches that `ol.explain` states against the profiler's DRAM counters, for four chains, unfused and fused.

    python benchmarks/dram_bytes.py RESULT.json      needs a CUDA device and Nsight Compute (ncu)

Under the profiler the script runs itself once (`--run`): each chain unfused and fused, forward and backward. A kernel that
nothing else uses marks where each of them begins.
"""

from __future__ import annotations

import csv
import io
import json
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import onelaunch as ol
from onelaunch.device import describe_machine
from onelaunch.fuse.decide import decision_on
from onelaunch.fuse.placing import place_regions
from onelaunch.fuse.record import record
from onelaunch.fuse.region import Options
from onelaunch.fuse.timing import contenders

METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
MARKER = "erfinv"
WITHIN = 0.10  # largest relative difference between stated and counted bytes


class Loss(nn.Module):
    def forward(self, logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits, target)


def cases() -> dict[str, tuple[nn.Module, tuple[torch.Tensor, ...]]]:
    """Chains over tensors of a gigabyte, so that what the L2 cache holds at either end is negligible."""
    bf16: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    return {
        "relu + dropout, 65536 x 4096, fp32": (
            nn.Sequential(nn.ReLU(), nn.Dropout(0.5)),
            (torch.randn(65536, 4096, device="cuda", requires_grad=True),),
        ),
        "batch_norm + relu + dropout, 262144 x 2048, bf16": (
            nn.Sequential(nn.BatchNorm1d(2048), nn.ReLU(), nn.Dropout(0.1)).cuda(),
            (torch.randn(262144, 2048, **bf16).requires_grad_(),),
        ),
        "linear + gelu + dropout, 131072 x 1024 x 4096, bf16": (
            nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Dropout(0.1)).to(**bf16),
            (torch.randn(131072, 1024, **bf16).requires_grad_(),),
        ),
        "cross_entropy, 16384 x 32768, bf16": (
            Loss(),
            (torch.randn(16384, 32768, **bf16).requires_grad_(), torch.randint(32768, (16384,), device="cuda")),
        ),
    }


def run() -> None:
    """Called under the profiler: runs the chains and prints the stated figures as one JSON line."""
    marker = torch.zeros(1, device="cuda")
    expected = []
    for name, (model, inputs) in cases().items():
        watched, _ = place_regions(model.train(), Options(), sized=True, everywhere=True)
        recorded = record(watched, inputs)
        (one,) = recorded.chains
        steps = [recorded.steps[position] for position in one.steps]
        device = inputs[0].device
        decision = decision_on(one, recorded, device)
        assert decision is not None
        del watched
        for way, work, call in zip(
            ("unfused", "fused"), (decision.before, decision.after), contenders(one, steps, device), strict=True
        ):
            call()
            torch.cuda.synchronize()
            torch.cuda.profiler.start()
            marker.erfinv_()
            call()
            torch.cuda.synchronize()
            torch.cuda.profiler.stop()
            expected.append(
                {"case": name, "way": way, "bytes": work.total.bytes, "launches": work.total.launches,
                 "seconds": decision.measured[way == "fused"] if decision.measured else None}
            )  # fmt: skip
        del one, steps, recorded, inputs, call
        torch.cuda.empty_cache()
    print("EXPECTED " + json.dumps(expected))


def profile(out: Path) -> int:
    command = ["ncu", "--clock-control", "none", "--cache-control", "none", "--profile-from-start", "off", "--csv"]
    command += ["--print-units", "base", "--print-kernel-base", "demangled"]
    command += ["--metrics", ",".join(METRICS), sys.executable, __file__, "--run"]
    if shutil.which(command[0]) is None:
        print(f"{command[0]} is not on the PATH: install Nsight Compute, or add its folder to PATH")
        return 2
    done = subprocess.run(command, capture_output=True, text=True)
    expected, kernels = expected_in(done.stdout), kernels_of(done.stdout)
    if done.returncode or not expected or not kernels:
        print(done.stdout[-3000:], done.stderr[-3000:])
        counts = f"{len(expected)} figures stated, {len(kernels)} kernels counted"
        print(f"the profiled run ended with {done.returncode}: {counts}")
        return 1
    found = compared(expected, kernels)
    result = {
        "machine": describe_machine(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": "python benchmarks/dram_bytes.py RESULT.json",
        "onelaunch": ol.__version__,
        "within": WITHIN,
        "chains": found,
    }
    out.write_text(json.dumps(result, indent=1) + "\n")
    for one in found:
        print(f"{one['case']:<52} {one['way']:<7} {one['bytes'] / 1e9:7.3f} GB stated, {one['dram_bytes'] / 1e9:7.3f} counted"
              f" ({one['ratio'] - 1:+.1%}); launches {one['launches']} stated, {one['kernels']} counted")  # fmt: skip
    return int(any(abs(one["ratio"] - 1) > WITHIN for one in found))


def expected_in(output: str) -> list[dict[str, Any]]:
    """The figures that `run` printed; the profiler may have written to the same line before them."""
    lines = [line.partition("EXPECTED ")[2] for line in output.splitlines() if "EXPECTED " in line]
    return json.loads(lines[-1]) if lines else []


def kernels_of(output: str) -> list[dict[str, Any]]:
    """Kernels in the order in which they ran, each with its DRAM bytes, from the profiler's CSV."""
    lines = output.splitlines()
    start = next((index for index, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    kernels: dict[str, dict[str, Any]] = {}
    for row in csv.DictReader(io.StringIO("\n".join(line for line in lines[start:] if line.startswith('"')))):
        if row["Metric Name"] in METRICS:
            kernel = kernels.setdefault(row["ID"], {"name": row["Kernel Name"], "bytes": 0.0})
            assert row["Metric Unit"] == "byte", row
            kernel["bytes"] += float(row["Metric Value"].replace(",", ""))
    return list(kernels.values())


def compared(expected: list[dict[str, Any]], kernels: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each stated figure with the bytes and kernels that were counted between its marker and the next."""
    runs: list[list[dict[str, Any]]] = []
    for kernel in kernels:
        if MARKER in kernel["name"]:
            runs.append([])
        else:
            runs[-1].append(kernel)
    assert len(runs) == len(expected), f"{len(runs)} ranges were counted for {len(expected)} runs"
    found = []
    for stated, ran in zip(expected, runs, strict=True):
        counted = sum(kernel["bytes"] for kernel in ran)
        names = [f"{kernel['bytes'] / 1e9:.3f} GB {kernel['name'][:90]}" for kernel in ran]
        found.append(
            {**stated, "dram_bytes": counted, "ratio": stated["bytes"] / counted, "kernels": len(ran), "names": names}
        )
    return found


if __name__ == "__main__":
    if sys.argv[1:] == ["--run"]:
        run()
    elif len(sys.argv) == 2:
        sys.exit(profile(Path(sys.argv[1])))
    else:
        sys.exit("usage: python benchmarks/dram_bytes.py RESULT.json")
