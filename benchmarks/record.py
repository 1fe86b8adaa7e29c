"""Records every benchmark of this machine's GPU: `python benchmarks/record.py [--folder benchmarks/results] [--only ops]`.

What is slow about recording is not the timing but what peers compile first (torch.compile, JAX). So all groups first run once
side by side, with every cache on disk and their figures thrown away, and then one after another with the machine to themselves.
Each writes `GROUP-CHIP-DATE.json`; `make readme` puts the newest of each case into the README. A group that fails does not stop
the others.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from onelaunch.files import cache_folder

ROOT = Path(__file__).resolve().parent.parent
ONELAUNCH = (sys.executable, "-m", "onelaunch")
SIZES = ("128", "256", "512", "1024", "2048", "4096", "8192")


def environment() -> dict[str, str]:
    """This process's, with JAX's compiled programs on disk too, and no process taking all the memory."""
    wanted = {
        "JAX_COMPILATION_CACHE_DIR": str(Path(tempfile.gettempdir()) / "onelaunch-jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    return {**wanted, **os.environ}


@dataclass(frozen=True)
class Group:
    """A command, which gets the file to write (or, where its results lie in a folder of its own, that folder) appended, and
    what cuts its warm-up into processes side by side: words, or nothing for a command that compiles little."""

    command: tuple[str, ...]
    parts: tuple[tuple[str, ...], ...] = ()
    inside: str = ""  # the results' name in that folder

    def record(self, out: Path) -> bool:
        with tempfile.TemporaryDirectory() as folder:
            to = Path(folder) if self.inside else out
            done = subprocess.run((*self.command, str(to)), env=environment(), cwd=ROOT, check=False)
            if self.inside and (to / self.inside).exists():
                shutil.copyfile(to / self.inside, out)
        return done.returncode == 0


def bench(*words: str, parts: tuple[str, ...] = ("",)) -> Group:
    return Group((*ONELAUNCH, "bench", *words, "--quick", "--out"), tuple(("--filter", part) for part in parts))


def script(name: str) -> Group:
    return Group((sys.executable, str(ROOT / "benchmarks" / name), "--out"))


GROUPS = {
    "train": bench("train", parts=("sgd/bf16", "adam", "sgd/auto", "sgd/fp32", "train/epoch", "mnist-98")),
    "large": bench("train", "--large", parts=("2048", "8192", "4096", "262144")),
    "sizes": Group(
        (*ONELAUNCH, "compare", "configs/classic-hidden.toml", "--precision", "bf16", "--epochs", "1",
         "--sizes", ",".join(SIZES), "--out"),
        tuple(("--sizes", size) for size in SIZES), "compare.json",
    ),
    "fuse": bench("fuse"),
    "fuse-dram": Group((sys.executable, "-m", "tests.fuse.dram_bytes")),
    "memory": bench("memory"),
    "ops": bench("ops", parts=("relu_dropout", "batch_norm", "cross_entropy", "linear")),
    "cold-launch": script("cold_launch.py"),
    "resident-phases": script("resident_phases.py"),
}  # fmt: skip


def warm_up(groups: list[Group], seconds: float) -> None:
    """Every part of every group once, side by side: what is compiled is on disk then. What it timed is thrown away."""
    commands = [(group.command, part) for group in groups for part in group.parts]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(max(1, (os.cpu_count() or 2) // 2)) as pool:

        def run(number: int) -> None:
            command, part = commands[number]
            out = str(Path(folder) / f"{number}.json")  # a file's name or a folder's
            try:
                subprocess.run(
                    (*command, out, *part), env=environment(), cwd=ROOT, capture_output=True, timeout=seconds
                )
            except subprocess.TimeoutExpired:
                print(f"not warm after {seconds:.0f} s: {' '.join((*command[3:-1], *part))}", flush=True)

        list(pool.map(run, range(len(commands))))
    for choices in ("linear", "fuse"):  # made by measurement, on a GPU that others were using
        shutil.rmtree(cache_folder(choices), ignore_errors=True)


def chosen(parser: argparse.ArgumentParser, only: str, skip: str) -> list[str]:
    wanted, left_out = (list(filter(None, names.split(","))) for names in (only, skip))
    if unknown := {*wanted, *left_out} - GROUPS.keys():
        parser.error(f"no group {', '.join(sorted(unknown))}: pass some of {', '.join(GROUPS)}")
    return [name for name in GROUPS if name in (wanted or GROUPS) and name not in left_out]


def main() -> int:
    parser = argparse.ArgumentParser(description="Records every benchmark of this machine's GPU.")
    parser.add_argument("--folder", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--only", default="", help=f"groups to record, of {', '.join(GROUPS)}")
    parser.add_argument("--skip", default="", help="groups to leave out")
    parser.add_argument("--data-dir", help="folder of the four MNIST files; else the cache, or a download")
    parser.add_argument("--warm-up-seconds", type=float, default=240, help="of each process of the warm-up; 0 for none")
    options = parser.parse_args()
    names = chosen(parser, options.only, options.skip)
    if not torch.cuda.is_available():
        parser.error("this machine has no CUDA device: `onelaunch bench cpu` times its CPU")
    groups = dict(GROUPS)
    if options.data_dir:
        sizes = groups["sizes"]
        groups["sizes"] = replace(
            sizes, command=(*sizes.command[:-1], "--data-dir", options.data_dir, sizes.command[-1])
        )
    chip = torch.cuda.get_device_name().split()[-1].lower()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    if options.warm_up_seconds:
        warm_up([groups[name] for name in names], options.warm_up_seconds)
        print(f"warm after {time.perf_counter() - begin:.0f} s", flush=True)
    failed = []
    for name in names:
        if not groups[name].record(folder / f"{name}-{chip}-{datetime.date.today():%Y-%m-%d}.json"):
            failed.append(name)
        print(f"{name}: {time.perf_counter() - begin:.0f} s", flush=True)
    print(f"failed: {', '.join(failed)}" if failed else "all recorded: now `make readme`")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
