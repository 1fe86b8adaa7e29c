"""The time of each phase of a resident step: `python benchmarks/resident_phases.py`, on a CUDA device.

Each network trains twice: unchanged, timed by events around its one launch; and with a clock stamp after every phase, taken by
thread 0 of block 0, which adds about 70 clocks per phase. `--out benchmarks/results/resident-phases-CHIP-DATE.json` records
clocks, registers, shared memory and spills; docs/resident.md explains them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from onelaunch.bench.results import check_writable, provenance, save_results
from onelaunch.bench.workload import Workload
from onelaunch.engines.resident.session import ResidentSession
from onelaunch.train.loop import StopSwitch
from onelaunch.train.progress import Progress

STEPS, STAMPED_STEPS, REPEATS, ROWS = 20_000, 2_000, 3, 61_440
SMALL = (784, 128, 128, 128, 10)
WORKLOADS = {
    "small": Workload(SMALL, 32, precision="bf16", uint8_rows=True),
    "small-floats": Workload(SMALL, 32, precision="bf16"),
    "small-adam": Workload(SMALL, 32, "adam", precision="bf16", uint8_rows=True),
    "small-auto-floats": Workload(SMALL, 32, precision="auto"),
    "small-auto": Workload(SMALL, 32, precision="auto", uint8_rows=True),
    "small-fp32": Workload(SMALL, 32, precision="fp32", uint8_rows=True),
    "medium": Workload((784, 512, 512, 512, 10), 32, precision="bf16", uint8_rows=True),
    "classic": Workload((784, 784, 784, 784, 10), 64, precision="bf16", uint8_rows=True),
    "classic-floats": Workload((784, 784, 784, 784, 10), 64, precision="bf16"),
    "narrow": Workload((64, 64, 64, 16), 256, precision="bf16", loss="mse", bias=False),
}


def train(workload: Workload, steps: int, *, stamps: bool) -> tuple[ResidentSession, float]:
    """Train `steps` steps. Returns the session, and the seconds that its launch took."""
    device = torch.device("cuda", torch.cuda.current_device())
    run = workload.run(device, rows=ROWS, engine="resident", steps=steps)
    session = ResidentSession(run, {}, stamps=stamps)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record(session.stream)
    losses = torch.cat([segment.losses for segment in session.segments(0, StopSwitch(Progress()))])
    end.record(session.stream)
    end.synchronize()
    if len(losses) != steps or not losses.isfinite().all():
        raise SystemExit(f"{workload.network} did not train: {len(losses)} of {steps} losses, the last {losses[-1]}")
    session.close()
    return session, start.elapsed_time(end) / 1e3


def phases_of(workload: Workload) -> dict[str, Any]:
    seconds = [train(workload, STEPS, stamps=False) for _ in range(REPEATS)]
    session, _ = train(workload, STAMPED_STEPS, stamps=True)
    clocks: dict[str, float] = {}
    for name, spent in zip(["between", *session.layout.phase_names()], session.stamps.tolist(), strict=False):
        clocks[name] = round(clocks.get(name, 0) + spent / STAMPED_STEPS, 1)
    plain = seconds[0][0]
    return {
        "network": workload.network, "batch": workload.batch, "optimizer": workload.optimizer,
        "precision": workload.precision, "loss": workload.loss, "rows": "uint8" if workload.uint8_rows else "float32",
        "placement": next(line for line in plain.plan.splitlines() if line.startswith("placement")),
        "registers": plain.kernel.registers, "spilled_bytes": plain.kernel.local_bytes,
        "shared_bytes": plain.layout.shared.size,
        "microseconds": round(statistics.median(each for _, each in seconds) / STEPS * 1e6, 3),
        "clocks": round(sum(clocks.values())), "phases": clocks,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description="The time of each phase of a resident step.")
    parser.add_argument("--out", type=Path, help="the JSON file to save the figures in")
    parser.add_argument("--only", help=f"one of {', '.join(WORKLOADS)}", choices=WORKLOADS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this machine has no CUDA device")
    if options.out:
        check_writable(options.out)
    results = provenance("python benchmarks/resident_phases.py")
    results["what"] = (
        "clocks per step that thread 0 of block 0 spends in each phase (a stamp adds about 70); the time without stamps"
    )
    results["networks"] = []
    for name, workload in WORKLOADS.items():
        if options.only in (None, name):
            found = phases_of(workload)
            results["networks"].append(found)
            sizes = f"{found['registers']} registers, {found['spilled_bytes']} spilled, {found['shared_bytes']} bytes shared"
            print(f"{name}: {found['microseconds']} µs per step, {sizes}, {found['clocks']} clocks")
            print("  " + " | ".join(f"{phase} {clocks:.0f}" for phase, clocks in found["phases"].items()), flush=True)
            if options.out:
                save_results(results, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
