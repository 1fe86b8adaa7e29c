"""All GPU tests in as many processes as help: `python -m tests.gpu_shards [PROCESSES]`, where pytest-xdist is not installed.

Tests are dealt out in turns; each process has caches of its own, so that none finds what another has just compiled.
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

PYTEST = (sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-o", "addopts=", "-p", "no:cacheprovider")


def collected() -> list[str]:
    found = subprocess.run((*PYTEST, "--collect-only", "tests"), cwd=ROOT, capture_output=True, text=True, check=False)
    return [line for line in found.stdout.splitlines() if re.match(r"tests/\S+\.py::", line)]


def run(names: list[str], cache: Path) -> tuple[int, str]:
    if not names:
        return 0, ""
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    done = subprocess.run((*PYTEST, *names), cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def main() -> int:
    processes = int(sys.argv[1]) if len(sys.argv) > 1 else max(1, (os.cpu_count() or 2) * 2 // 3)
    names, begin = collected(), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(processes) as pool:
        shards = [(names[first::processes], Path(folder) / str(first)) for first in range(processes)]
        results = list(pool.map(lambda shard: run(*shard), shards))
    for code, said in results:
        lines = said.splitlines()
        if code not in (0, 5):
            print("\n".join(line for line in lines if line.startswith(("FAILED", "ERROR", "E  "))))
        print(lines[-1] if lines else "nothing to run")
    print(f"{len(names)} tests in {processes} processes, {time.perf_counter() - begin:.0f} s")
    return 1 if any(code not in (0, 5) for code, _ in results) else 0


if __name__ == "__main__":
    sys.exit(main())
