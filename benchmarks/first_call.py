"""How long the first call takes: `python benchmarks/first_call.py [--model bert]`, each contender in processes of its own.

A first call compiles, and `ol.fuse` with example inputs also measures. Each contender runs twice: with empty caches on disk,
and again with those that the first process has left. Two rounds, the second in reverse order: a machine may be slower at
first. The contenders without an optimizer run forward, loss and backward; the others train. The names of models are those of
`onelaunch.bench.model_zoo`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from onelaunch.bench import model_zoo
from onelaunch.bench.cases import fused_models, models
from onelaunch.bench.model_zoo import Workload
from onelaunch.fuse import fuse

LATER_CALLS = 10
LIMIT_SECONDS = 1200.0  # of one process
Call = Callable[[], Any]


def _called(make_model: Callable[[Workload], nn.Module]) -> Callable[[Workload], Call]:
    return lambda workload: fused_models.trained(workload, make_model(workload))


def _trained(make_step: Callable[..., models.Step], **options: Any) -> Callable[[Workload], Call]:
    def contender(workload: Workload) -> Call:
        step = make_step(workload, models.optimizer_of(workload, models.LR), **options)
        return lambda: step(*workload.arguments)

    return contender


CONTENDERS: dict[str, Callable[[Workload], Call]] = {
    "eager": _called(lambda workload: workload.model),
    "torch.compile": _called(fused_models.compiled_in("default")),
    "ol.fuse": _called(lambda workload: fuse(workload.model)),
    "ol.fuse with inputs": _called(fused_models.fused),
    "torch.compile, optimizer": _trained(models.torch_step, mode="default"),
    "ol.train_step": _trained(models.our_step),
}


def seconds_of(name: str, model: str) -> dict[str, float]:
    """Seconds of a contender's first call, of its second, and the median of LATER_CALLS more, in this process."""
    workload = getattr(model_zoo, model)(False)

    def wait() -> None:
        if model_zoo.DEVICE == "cuda":
            torch.cuda.synchronize()

    wait()
    begin, ends = time.perf_counter(), []
    call = CONTENDERS[name](workload)
    for _ in range(2 + LATER_CALLS):
        call()
        wait()
        ends.append(time.perf_counter())
    times = [end - start for start, end in zip([begin, *ends], ends, strict=False)]
    return {"first": times[0], "second": times[1], "later": statistics.median(times[2:])}


def in_a_process(name: str, model: str, caches: Path) -> dict[str, float]:
    """The same in a process of its own, with its caches in this folder. Raises CalledProcessError where it fails."""
    variables = "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH"
    environment = {**os.environ, **{variable: str(caches / variable) for variable in variables}}
    command = (sys.executable, __file__, "--model", model, "--only", name, "--here")
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, timeout=LIMIT_SECONDS)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Seconds of first calls, with empty and with filled caches.")
    parser.add_argument("--model", default="bert", help="a model of onelaunch.bench.model_zoo")
    parser.add_argument(
        "--only", choices=CONTENDERS, action="append", help="this contender; may be given several times"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if not callable(getattr(model_zoo, given.model, None)):
        parser.error(f"--model {given.model!r} is not in onelaunch.bench.model_zoo: pass one that is, such as bert")
    names = given.only or [*CONTENDERS]
    if given.here:
        model_zoo.DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
        print(json.dumps(seconds_of(names[0], given.model)))
        return
    print(f"{'contender':<26}{'caches':<8}{'first call':>12}{'second':>12}{'later, median':>16}")
    for number in range(given.rounds):
        for name in names[:: -1 if number % 2 else 1]:
            with tempfile.TemporaryDirectory() as folder:
                for caches in ("empty", "filled"):
                    found = in_a_process(name, given.model, Path(folder))
                    times = f"{found['first']:>10.2f} s{found['second']:>10.2f} s{1e3 * found['later']:>13.3f} ms"
                    print(f"{name:<26}{caches:<8}{times}", flush=True)


if __name__ == "__main__":
    main()
