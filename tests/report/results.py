"""Results of every kind, with names that must be escaped in HTML."""

from __future__ import annotations

from typing import Any

MACHINE = {
    "system": "Linux", "cpu": {"name": "CPU <b>", "cores": 2, "torch_threads": 2}, "gpus": [{"name": "NVIDIA H200"}],
    "driver": "580.1", "versions": {"onelaunch": "0.1.0", "python": "3.11", "torch": "2.11", "triton": "absent"},
}  # fmt: skip
STATE = {"sm_mhz": 1980, "memory_mhz": 3201, "celsius": 40, "watts": 500.0, "held_back_by": ["power cap"]}


def timing(median: float) -> dict[str, Any]:
    return {"median": median, "minimum": 0.9 * median, "maximum": 1.3 * median,
            "quartiles": [0.95 * median, 1.1 * median], "n": 20, "spread": 0.02}  # fmt: skip


def bench_case(name: str, group: str, ours: float = 1e-4, **more: Any) -> dict[str, Any]:
    times = {"onelaunch": ours, "torch eager": 2.5e-4, "JAX & scan": 0.9e-4, "floor: copy": 0.8e-4}
    return {
        "name": name, "group": group, "about": "what <is> done", "unit": "call", "check": "passed",
        "times": {who: timing(t) for who, t in times.items()},
        "ratio": {who: t / ours for who, t in times.items() if who != "onelaunch"}, "absent": {"peer": "not installed"},
        "peak_bytes": {"onelaunch": 2**20, "torch eager": 3 * 2**20}, "floor_seconds": 0.8e-4, "floor_share": 0.8e-4 / ours,
        "work": {"bytes": 4e8, "flops": 2e9}, "dtype": "bf16", "notes": {"placement": "cluster of 8"},
        "gpu": {"before": STATE, "after": STATE}, "joules": {"onelaunch": 0.02, "torch eager": 0.06}, **more,
    }  # fmt: skip


def bench_results() -> dict[str, Any]:
    cases = [bench_case("ops/relu", "ops"), bench_case("memory/step", "memory", 3e-4)]
    failed = {"name": "ops/broken", "group": "ops", "about": "", "unit": "call", "times": {}}
    cases.append({**failed, "check": "failed: AssertionError: output differs by 3.0"})
    cases.append({**failed, "name": "ops/gpu", "check": "skipped: needs another chip"})
    return {
        "command": "onelaunch bench ops memory", "machine": MACHINE, "commit": "abc", "date": "2026-11-15T00:00:00+00:00",
        "quick": True, "cores_taken": [0.1, 0.5], "interrupted": True,
        "ceilings": {"cuda": {"copy": 4e12, "bf16": 7e14}}, "cases": cases,
    }  # fmt: skip


def contender(step: float, gap: dict[str, Any] | None) -> dict[str, Any]:
    spread = {"median": step, "mean": step, "minimum": 0.9 * step, "maximum": 1.2 * step, "deviation": 0.0, "n": 3}
    steps = list(range(10, 101, 10))
    mean = [2.0 / (1 + s / 20) for s in steps]
    return {
        "step_seconds": spread, "epoch_seconds": {**spread, "median": 50 * step}, "startup_seconds": 0.5,
        "peak_bytes": 10 * 2**20,
        "final": {"loss": {**spread, "mean": 0.3}, "accuracy": {**spread, "mean": 0.97, "deviation": 0.01}},
        "curve": {"steps": steps, "mean": mean, "low": [0.9 * m for m in mean], "high": [1.1 * m for m in mean]},
        "gap": gap,
    }  # fmt: skip


def compare_results() -> dict[str, Any]:
    gap = {"relative": 0.01, "bound": 0.05, "first_step": 0, "last_step": 9, "agrees": True}
    sizes = {"128": timing(1e-5), "8192": timing(1e-3)}
    slower = {"128": timing(1e-4), "8192": timing(0.9e-3)}
    return {
        "command": "onelaunch compare", "machine": MACHINE, "commit": "abc", "date": "2026-11-15T00:00:00+00:00",
        "network": "784-128-10, relu", "data": "MNIST", "rows": 1000, "batch_size": 20, "steps": 100,
        "steps_per_epoch": 50, "seeds": [0, 1], "interrupted": False, "absent": {"onelaunch graph": "no CUDA"},
        "contenders": {
            "torch eager": contender(1e-4, None),
            "torch.compile": contender(2e-4, {**gap, "agrees": False, "relative": 0.4}),
            "onelaunch resident": contender(1e-5, gap),
        },
        "memory": {"torch eager": {"operations": ["a", "b", "c"], "bytes": [100, 300, 200]}, "onelaunch cpu": {"flat": 150}},
        "sizes": {
            "hidden": [128, 8192], "auto": {"128": "onelaunch resident", "8192": "onelaunch resident"},
            "step_seconds": {"torch eager": slower, "onelaunch resident": sizes}, "absent": {},
        },
    }  # fmt: skip


def many_contenders() -> dict[str, Any]:
    results = compare_results()
    for number in range(9):
        results["contenders"][f"peer {number}"] = results["contenders"]["torch.compile"]
    return results
