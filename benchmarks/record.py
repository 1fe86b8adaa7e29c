"""Records every benchmark of this machine's GPU: `python benchmarks/record.py [--folder benchmarks/results] [--skip ops]`.

What is slow about recording is not the timing but what peers compile first (torch.compile, JAX). So all groups first run once
side by side, with every cache on disk and their figures thrown away, and then one after another with the machine to themselves.
Each writes `GROUP-CHIP-DATE.json`; `make readme` puts the newest of each case into the README. A group that fails does not stop
the others.
"""

from __future__ import annotations

import argparse
import datetime
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

BENCH = (sys.executable, "-m", "onelaunch", "bench")
# By group: the command, which takes --out; and filters that cut its warm-up into processes.
GROUPS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "train": (
        (*BENCH, "train", "--quick"),
        ("sgd/bf16", "adam", "sgd/auto", "sgd/fp32", "train/epoch", "mnist-98"),
    ),
    "large": ((*BENCH, "train", "--large", "--quick"), ("2048", "8192", "4096", "262144")),
    "fuse": ((*BENCH, "fuse", "--quick"), ("",)),
    "memory": ((*BENCH, "memory", "--quick"), ("",)),
    "ops": ((*BENCH, "ops", "--quick"), ("relu_dropout", "batch_norm", "cross_entropy", "linear")),
    "cold-launch": ((sys.executable, str(Path(__file__).with_name("cold_launch.py"))), ()),
    "resident-phases": ((sys.executable, str(Path(__file__).with_name("resident_phases.py"))), ()),
}


def caches() -> dict[str, str]:
    """The environment with JAX's compiled programs on disk too, and no process taking all the memory."""
    folder = Path(tempfile.gettempdir()) / "onelaunch-jax"
    wanted = {
        "JAX_COMPILATION_CACHE_DIR": str(folder),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    return {**wanted, **os.environ}


def warm_up(groups: list[str], seconds: float) -> None:
    commands = [(*GROUPS[name][0], "--filter", part) for name in groups for part in GROUPS[name][1]]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:

        def run(number: int) -> None:
            command = (*commands[number], "--out", str(Path(folder) / f"{number}.json"))
            try:
                subprocess.run(command, env=caches(), capture_output=True, check=False, timeout=seconds)
            except subprocess.TimeoutExpired:
                print(f"not warm after {seconds:.0f} s: {' '.join(commands[number][3:])}", flush=True)

        list(pool.map(run, range(len(commands))))


def main() -> int:
    parser = argparse.ArgumentParser(description="Records every benchmark of this machine's GPU.")
    parser.add_argument("--folder", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--skip", default="", help=f"groups to leave out, of {', '.join(GROUPS)}")
    parser.add_argument("--warm-up-seconds", type=float, default=240, help="of each process of the warm-up; 0 for none")
    options = parser.parse_args()
    skipped = set(filter(None, options.skip.split(",")))
    if unknown := skipped - GROUPS.keys():
        parser.error(f"--skip {','.join(sorted(unknown))}: pass some of {', '.join(GROUPS)}")
    if not torch.cuda.is_available():
        parser.error("this machine has no CUDA device: `onelaunch bench cpu` times its CPU")
    groups = [name for name in GROUPS if name not in skipped]
    chip = torch.cuda.get_device_name().split()[-1].lower()
    options.folder.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    if options.warm_up_seconds:
        warm_up(groups, options.warm_up_seconds)
        print(f"warm after {time.perf_counter() - begin:.0f} s", flush=True)
    failed = []
    for name in groups:
        out = options.folder / f"{name}-{chip}-{datetime.date.today():%Y-%m-%d}.json"
        if subprocess.run((*GROUPS[name][0], "--out", str(out)), env=caches(), check=False).returncode:
            failed.append(name)
        print(f"{name}: {time.perf_counter() - begin:.0f} s", flush=True)
    print(f"failed: {', '.join(failed)}" if failed else "all recorded: now `make readme`")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
