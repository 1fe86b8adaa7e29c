"""One model of the zoo in a process of its own: `python -m onelaunch.bench.zoo.process JSON`.

It compiles ours and the peer, says so, waits for a line on its input, so that no other process is timed meanwhile, and then
times both. Each line of its output that begins with a brace is JSON.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from onelaunch.bench.cases.models import OURS, captured_step, optimizer_of, torch_step
from onelaunch.bench.model_zoo import Workload
from onelaunch.bench.step_peers import COMPILED_GRAPH
from onelaunch.bench.zoo.draw import Drawn
from onelaunch.bench.zoo.models import build
from onelaunch.errors import type_and_message
from onelaunch.step.train_step import train_step

Step = Callable[..., torch.Tensor]
LR = 1e-5
ROUNDS, SECONDS = 9, 0.12  # of timing, for each contender, and how long each takes
MAX_TUNED = 200  # steps in which a choice is made


class Autocast(nn.Module):
    """A model whose forward pass runs in bf16 autocast, for the peer; ours has an argument for that."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            return self.model(*args, **kwargs)


def as_peers_see_it(drawn: Drawn, workload: Workload) -> Workload:
    return workload._replace(model=Autocast(workload.model)) if drawn.small else workload


def our_step(drawn: Drawn, workload: Workload, notes: dict[str, Any]) -> Step:
    step = train_step(
        workload.model, workload.loss, optimizer_of(workload, LR), autocast="bf16" if drawn.small else None, tune=True
    )
    begin = time.perf_counter()
    step(*workload.arguments).item()
    notes["first_step"][OURS] = time.perf_counter() - begin
    for number in range(MAX_TUNED):
        step(*workload.arguments)
        torch.cuda.synchronize()
        if number > 5 and (step.choice or not step._plain.candidates.takes_turns):
            break
    notes |= {"choice": step.choice, "reason": step.reason}
    return step


def peers_step(drawn: Drawn, workload: Workload, notes: dict[str, Any]) -> Step:
    workload = as_peers_see_it(drawn, workload)
    begin = time.perf_counter()
    step = captured_step(workload, optimizer_of(workload, LR), mode="default")
    notes["captured"] = {COMPILED_GRAPH: time.perf_counter() - begin}
    return step


MAKERS = {OURS: our_step, COMPILED_GRAPH: peers_step}


def measure(steps: dict[str, tuple[Step, tuple[Any, ...]]]) -> dict[str, list[float]]:
    """Seconds per step, several samples of each, in turns."""
    calls = {name: max(3, int(SECONDS / _seconds(*step, 3))) for name, step in steps.items()}
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            found[name].append(_seconds(*step, calls[name]))
    return found


def _seconds(step: Step, arguments: tuple[Any, ...], calls: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(calls):
        step(*arguments)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / calls / 1e3


def operations(step: Step, arguments: tuple[Any, ...]) -> dict[str, int]:
    """How many kernels and copies one step has on the device."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        step(*arguments)
        torch.cuda.synchronize()
    names = [
        event.key for event in profile.key_averages() for _ in range(event.count) if event.self_device_time_total > 0
    ]
    return {"kernels": sum("Mem" not in name for name in names), "copies": sum("Memcpy" in name for name in names)}


@contextlib.contextmanager
def peak_of(name: str, peaks: dict[str, int]) -> Iterator[None]:
    gc.collect()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    yield
    torch.cuda.synchronize()
    peaks[name] = torch.cuda.max_memory_allocated() - before


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def main(given: str) -> None:
    asked = json.loads(given)
    drawn, seed = Drawn(*asked["drawn"]), asked["seed"]
    notes: dict[str, Any] = {"first_step": {}, "peak_bytes": {}}
    try:
        workload = as_peers_see_it(drawn, build(drawn, seed))
        parameters = sum(one.numel() for one in workload.model.parameters())
        torch_step(workload, optimizer_of(workload, LR))(*workload.arguments)
        del workload
    except Exception as error:  # whatever a model does that cannot be trained so
        say(skipped=type_and_message(error)[:200])
        return
    say(trains=True)
    steps = {}
    for name, make in MAKERS.items():
        workload = build(drawn, seed)
        try:
            with peak_of(name, notes["peak_bytes"]):
                steps[name] = make(drawn, workload, notes), workload.arguments
        except Exception as error:
            say(failed=f"{name}: {type_and_message(error)[:300]}")
            return
    say(ready=True)
    sys.stdin.readline()
    notes["operations"] = {name: operations(*step) for name, step in steps.items()}
    say(seconds=measure(steps), parameters=parameters, **notes)


if __name__ == "__main__":
    main(sys.argv[1])
    sys.stdout.flush()
    os._exit(0)  # the processes of Inductor would keep it for seconds
