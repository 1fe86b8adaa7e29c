"""Records every benchmark of this machine's GPU: `python benchmarks/record.py [--folder benchmarks/results] [--only ops]`.

All commands run one after another, with the machine to themselves: peers that compile (torch.compile, JAX) time kernels while
they do, and beside other processes they choose wrong ones. Each group writes `GROUP-CHIP-DATE.json`; `make readme` puts the
newest recording of each case into the README and docs. A group that fails does not stop the others. All of it takes about an
hour, most of it to compile peers; `--only` and `--skip` divide it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from onelaunch.bench.case import GROUPS as BENCH_GROUPS
from onelaunch.bench.results import load_results
from onelaunch.bench.run import select
from onelaunch.files import write_atomic

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
    inside: str = ""  # for a command that writes a folder: the name of the results file in it

    def record(self, out: Path) -> bool:
        with tempfile.TemporaryDirectory() as folder:
            to = Path(folder) if self.inside else out
            done = subprocess.run((*self.command, str(to)), env=environment(), cwd=ROOT, check=False)
            if self.inside and (to / self.inside).exists():
                shutil.copyfile(to / self.inside, out)
        return done.returncode == 0


@dataclass(frozen=True)
class CaseByCase:
    """A group of `onelaunch bench` with a process for each case: none finds another's compiled code, or has less memory."""

    group: str
    quick: bool = True

    def record(self, out: Path) -> bool:
        cases = [case.name for case in select(self.group)]
        with tempfile.TemporaryDirectory() as folder:
            paths = [Path(folder) / f"{number}.json" for number in range(len(cases))]
            done = [
                Recording(bench(self.group, "--filter", name, quick=self.quick)).record(path)
                for name, path in zip(cases, paths, strict=True)
            ]
            found = [load_results(path) for path in paths if path.exists()]
        if found:
            joined = {key: [entry for one in found for entry in one[key]] for key in ("planned", "left_out", "cases")}
            command = " ".join(("onelaunch", *bench(self.group, quick=self.quick)[len(ONELAUNCH) : -1]))
            whole = {**found[-1], **joined, "command": command, "finished": all(done)}
            write_atomic(out, json.dumps(whole, indent=1) + "\n")
        return all(done)


def bench(*words: str, quick: bool = True) -> tuple[str, ...]:
    few = ("--quick", "--limit", "36000") if quick else ()  # few samples, but of all cases and peers
    return (*ONELAUNCH, "bench", *words, *few, "--out")


def script(name: str) -> Recording:
    return Recording((sys.executable, str(ROOT / "benchmarks" / name), "--out"))


RECORDINGS: dict[str, Recording | CaseByCase] = {
    **{name: Recording(bench(name)) for name, group in BENCH_GROUPS.items() if group.on_gpu is not False},
    "models": CaseByCase("models"),
    "sweep": CaseByCase("sweep", quick=False),
    "large": Recording(bench("train", "--large")),
    "sizes": Recording(
        (*ONELAUNCH, "compare", "configs/classic-hidden.toml", "--precision", "bf16", "--epochs", "1",
         "--sizes", ",".join(SIZES), "--out"), "compare.json",
    ),
    "cold-launch": script("cold_launch.py"),
    "resident-phases": script("resident_phases.py"),
}  # fmt: skip


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
    failed = []
    for name in names:
        if not recordings[name].record(folder / f"{name}-{chip}-{datetime.date.today():%Y-%m-%d}.json"):
            failed.append(name)
        print(f"{name}: {time.perf_counter() - begin:.0f} s", flush=True)
    print(f"failed: {', '.join(failed)}" if failed else "all recorded: now `make readme`")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
