"""Records every benchmark of this machine's GPU: `python benchmarks/record.py [--folder benchmarks/results] [--only ops]`.

Peers that compile first (torch.compile, JAX) take most of the time. So all groups first run once side by side, with every cache
on disk and their figures thrown away, and then one after another with the machine to themselves. The real models and sweeps are
built in a process each, a few at a time, and timed under a lock, one after another. Each group writes `GROUP-CHIP-DATE.json`;
`make readme` puts the newest recording of each case into the README and docs. A group that fails does not stop the others.

Where a machine is lent for minutes at a time: `--stage warm-up` and then, before its disk is gone, `--stage record`.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import onelaunch.bench.cases  # noqa: F401 (fills REGISTRY)
from onelaunch.bench.alone import LOCK
from onelaunch.bench.case import GROUPS as BENCH_GROUPS
from onelaunch.bench.case import REGISTRY
from onelaunch.bench.results import load_results
from onelaunch.files import cache_folder, write_atomic

ROOT = Path(__file__).resolve().parent.parent
ONELAUNCH = (sys.executable, "-m", "onelaunch")
SIZES = ("128", "256", "512", "1024", "2048", "4096", "8192")


def environment() -> dict[str, str]:
    """This process's environment, with JAX's compiled programs on disk too, and no process that takes all of the memory."""
    settings = {
        "JAX_COMPILATION_CACHE_DIR": str(Path(tempfile.gettempdir()) / "onelaunch-jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    return {**settings, **os.environ}


@dataclass(frozen=True)
class Recording:
    """A command that records results. The path to write to is appended to it."""

    command: tuple[str, ...]
    parts: tuple[tuple[str, ...], ...] = ()  # further arguments of each process of the warm-up; none for no warm-up
    inside: str = ""  # for a command that writes a folder: the name of the results file in it

    def warm_ups(self, outs: Iterator[str]) -> list[tuple[str, ...]]:
        """The commands of the warm-up, each with a path of its own to write to."""
        return [(*self.command, next(outs), *part) for part in self.parts]

    def record(self, out: Path) -> bool:
        with tempfile.TemporaryDirectory() as folder:
            to = Path(folder) if self.inside else out
            done = subprocess.run((*self.command, str(to)), env=environment(), cwd=ROOT, check=False)
            if self.inside and (to / self.inside).exists():
                shutil.copyfile(to / self.inside, out)
        return done.returncode == 0


@dataclass(frozen=True)
class SideBySide:
    """A group of `onelaunch bench` whose cases are built in a process each, some at a time, and timed one after another."""

    group: str
    filters: tuple[str, ...]  # one case each
    alone: tuple[str, ...]  # cases built and timed afterwards, when no other process is left
    processes: int
    quick: bool = True  # without the peers that take minutes to compile

    def command(self, name: str, out: str) -> tuple[str, ...]:
        quick = (
            ("--quick", "--limit", "3600") if self.quick else ()
        )  # with a limit of its own it does not stop after a minute
        return (*ONELAUNCH, "bench", self.group, "--filter", name, *quick, "--out", out)

    def warm_ups(self, outs: Iterator[str]) -> list[tuple[str, ...]]:
        return [self.command(name, next(outs)) for name in (*self.filters, *self.alone)]

    def record(self, out: Path) -> bool:
        with tempfile.TemporaryDirectory() as folder:
            paths = {name: Path(folder) / f"{number}.json" for number, name in enumerate((*self.filters, *self.alone))}
            variables = {**environment(), LOCK: str(Path(folder) / "lock")}

            def run(name: str) -> bool:
                command = self.command(name, str(paths[name]))
                return subprocess.run(command, env=variables, cwd=ROOT, check=False).returncode == 0

            with ThreadPoolExecutor(self.processes) as pool:
                done = list(pool.map(run, self.filters))
            done += map(run, self.alone)
            found = [load_results(path) for path in paths.values() if path.exists()]
        if found:
            joined = {key: [entry for one in found for entry in one[key]] for key in ("planned", "left_out", "cases")}
            command = f"onelaunch bench {self.group}{' --quick' * self.quick}"
            whole = {**found[-1], **joined, "command": command, "finished": all(done)}
            write_atomic(out, json.dumps(whole, indent=1) + "\n")
        return all(done)


def bench(*words: str, parts: tuple[str, ...] = ("",)) -> Recording:
    # With a limit of its own, --quick does not stop after a minute.
    command = (*ONELAUNCH, "bench", *words, "--quick", "--limit", "3600", "--out")
    return Recording(command, tuple(("--filter", part) for part in parts))


def script(name: str) -> Recording:
    return Recording((sys.executable, str(ROOT / "benchmarks" / name), "--out"))


WARM_UP_FILTERS = {
    "train": ("sgd/bf16", "adam", "sgd/auto", "sgd/fp32", "train/epoch", "mnist-98"),
    "ops": ("relu_dropout", "batch_norm", "cross_entropy", "linear"),
}
# In this order four of them at a time fit into 140 GB of device memory. Of those alone, the host's time or `fuse`'s choice
# between candidates counts.
MODELS = tuple(f"models/{name}" for name in ("llama", "gpt2", "bert", "encoder", "vit", "mixer", "resnet"))
MODELS_ALONE = tuple(
    f"models/{name}" for name in ("dqn", "eval-mlp", "eval-bert", "eval-resnet", "fuse-bert", "fuse-resnet")
)
SWEEPS = tuple(name for name in REGISTRY if name.startswith("sweep/") and name != "sweep/digits")
RECORDINGS: dict[str, Recording | SideBySide] = {
    **{
        name: bench(name, parts=WARM_UP_FILTERS.get(name, ("",)))
        for name, group in BENCH_GROUPS.items() if group.on_gpu is not False
    },
    "models": SideBySide("models", MODELS, MODELS_ALONE, processes=4),
    "sweep": SideBySide("sweep", SWEEPS, ("sweep/digits",), processes=8, quick=False),
    "large": bench("train", "--large", parts=("2048", "8192", "4096", "262144")),
    "sizes": Recording(
        (*ONELAUNCH, "compare", "configs/classic-hidden.toml", "--precision", "bf16", "--epochs", "1",
         "--sizes", ",".join(SIZES), "--out"),
        tuple(("--sizes", size) for size in SIZES), "compare.json",
    ),
    "cold-launch": script("cold_launch.py"),
    "resident-phases": script("resident_phases.py"),
}  # fmt: skip


def warm_up(recordings: list[Recording | SideBySide], seconds: float) -> None:
    """Run every part once, side by side, so that compiled code is on disk. The times are thrown away."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(max(1, (os.cpu_count() or 2) * 2 // 3)) as pool:
        outs = (str(Path(folder) / str(number)) for number in itertools.count())  # of files or folders
        groups = [one.warm_ups(outs) for one in recordings]
        # In turns: not all of the largest models at once, which would not fit into the device's memory.
        in_turns = [command for turn in itertools.zip_longest(*groups) for command in turn if command]

        def run(command: tuple[str, ...]) -> None:
            try:
                subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, timeout=seconds)
            except subprocess.TimeoutExpired:
                print(f"not warm after {seconds:.0f} s: {' '.join(command[3:])}", flush=True)

        list(pool.map(run, in_turns))
    for choices in ("linear", "fuse"):  # they were measured on a GPU that other processes used
        shutil.rmtree(cache_folder(choices), ignore_errors=True)


def chosen(parser: argparse.ArgumentParser, only: str, skip: str) -> list[str]:
    included, excluded = (list(filter(None, names.split(","))) for names in (only, skip))
    if unknown := {*included, *excluded} - RECORDINGS.keys():
        parser.error(f"no group {', '.join(sorted(unknown))}: pass some of {', '.join(RECORDINGS)}")
    return [name for name in RECORDINGS if name in (included or RECORDINGS) and name not in excluded]


def main() -> int:
    parser = argparse.ArgumentParser(description="Records every benchmark of this machine's GPU.")
    parser.add_argument("--folder", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--only", default="", help=f"groups to record, of {', '.join(RECORDINGS)}")
    parser.add_argument("--skip", default="", help="groups to leave out")
    parser.add_argument("--data-dir", help="folder of the four MNIST files; else the cache, or a download")
    parser.add_argument(
        "--warm-up-seconds", type=float, default=240, help="time limit of each warm-up process; 0 for no warm-up"
    )
    parser.add_argument("--stage", choices=("both", "warm-up", "record"), default="both", help="default: both")
    options = parser.parse_args()
    names = chosen(parser, options.only, options.skip)
    if not torch.cuda.is_available():
        parser.error("this machine has no CUDA device: `onelaunch bench cpu` times its CPU")
    recordings = dict(RECORDINGS)
    sizes = recordings["sizes"]
    if options.data_dir and isinstance(sizes, Recording):
        recordings["sizes"] = replace(
            sizes, command=(*sizes.command[:-1], "--data-dir", options.data_dir, sizes.command[-1])
        )
    chip = torch.cuda.get_device_name().split()[-1].lower()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    if options.warm_up_seconds and options.stage != "record":
        warm_up([recordings[name] for name in names], options.warm_up_seconds)
        print(f"warm after {time.perf_counter() - begin:.0f} s", flush=True)
    if options.stage == "warm-up":
        return 0
    failed = []
    for name in names:
        if not recordings[name].record(folder / f"{name}-{chip}-{datetime.date.today():%Y-%m-%d}.json"):
            failed.append(name)
        print(f"{name}: {time.perf_counter() - begin:.0f} s", flush=True)
    print(f"failed: {', '.join(failed)}" if failed else "all recorded: now `make readme`")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
