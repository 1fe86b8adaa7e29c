"""All GPU tests in parallel processes, without pytest-xdist: `python -m tests.gpu_shards [PROCESSES [PATH…]]`.

Tests are dealt out in turns; each process has caches of its own, so that none finds what another has just compiled. Those
marked `alone` measure the GPU: they come last, when no other process is on it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.conftest import ROOT

PYTEST = (sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider")
NOTHING_WRONG = {0, 5}  # pytest's exit codes: all passed, nothing collected


def collected(marks: str, paths: list[str]) -> list[str]:
    command = (*PYTEST, "-m", marks, "--collect-only", *paths)
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if found.returncode not in NOTHING_WRONG:
        sys.exit(f"the tests cannot be collected:\n{found.stdout}{found.stderr}")
    return [line for line in found.stdout.splitlines() if re.match(r"tests/\S+\.py::", line)]


def run(names: list[str], cache: Path) -> int:
    """One process's tests; what failed and its last line are printed as it ends."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    done = subprocess.run((*PYTEST, *names), cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    lines = (done.stdout + done.stderr).splitlines()
    if done.returncode not in NOTHING_WRONG:
        print("\n".join(line for line in lines if line.startswith(("FAILED", "ERROR", "E  "))))
    print(f"{lines[-1] if lines else 'nothing said'} (first: {names[0]})", flush=True)
    return done.returncode


def main() -> int:
    processes = int(sys.argv[1]) if len(sys.argv) > 1 else max(1, (os.cpu_count() or 2) * 2 // 3)
    paths, begin = sys.argv[2:] or ["tests"], time.perf_counter()
    names, alone = collected("gpu and not alone", paths), collected("gpu and alone", paths)
    slow = [name for name in names if "sanitizer" in name]  # a process each, and first: they take minutes
    rest = [name for name in names if "sanitizer" not in name]
    shards = [[name] for name in slow] + [rest[first::processes] for first in range(processes)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(processes) as pool:
        caches = [Path(folder) / str(number) for number in range(len(shards))]
        codes = list(pool.map(run, filter(None, shards), caches))
        codes += [run(alone, Path(folder) / "alone")] if alone else []
    print(f"{len(names) + len(alone)} tests in {processes} processes, {time.perf_counter() - begin:.0f} s")
    return 1 if set(codes) - NOTHING_WRONG else 0


if __name__ == "__main__":
    sys.exit(main())
