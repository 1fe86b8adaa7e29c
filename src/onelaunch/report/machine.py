"""Where something ran, as facts for the page."""

from __future__ import annotations

from typing import Any

from onelaunch.device import BUSY_SHARE

PACKAGES = ("torch", "triton", "cuda-core", "llvmlite", "jax", "scikit-learn")


def chip(machine: dict[str, Any], gpu: bool = True) -> str:
    """The name of what did the work: the GPU where there is one."""
    if gpu and machine.get("gpus"):
        return str(machine["gpus"][0]["name"])
    cpu = machine.get("cpu", {})
    return f"{cpu.get('name', 'unknown CPU')}, {cpu.get('torch_threads', '?')} threads"


def machine_facts(source: dict[str, Any]) -> list[tuple[str, str]]:
    machine = source.get("machine", {})
    versions = machine.get("versions", {})
    found = [f"{name} {versions[name]}" for name in PACKAGES if versions.get(name, "absent") != "absent"]
    driver = f", driver {machine['driver']}" if machine.get("driver") else ""
    return [
        ("machine", chip(machine) + driver),
        ("its processor", chip(machine, gpu=False) if machine.get("gpus") else ""),
        ("system", f"{machine.get('system', '')}, Python {versions.get('python', '?')}" if machine else ""),
        ("versions", ", ".join([f"onelaunch {versions.get('onelaunch', '?')}", *found]) if versions else ""),
        ("commit", source.get("commit", "")),
        ("source tree", source.get("source", "")),
        ("date", source.get("date", "")),
        ("others", _others(source)),
    ]


def busy(source: dict[str, Any]) -> list[tuple[str, str]]:
    """What to say of results that were taken while others used the machine, as `bench` itself says it."""
    cores = source.get("machine", {}).get("cpu", {}).get("cores") or 0
    taken = max(source.get("cores_taken") or [0])
    if not cores or taken <= BUSY_SHARE * cores:
        return []
    words = (
        f"The machine was busy: others took {taken:.1f} of {cores} cores. Times may be far off, the peers' most of all."
    )
    return [("bad", words)]


def _others(source: dict[str, Any]) -> str:
    """What else ran there. Older results have the load average in its place."""
    cores = source.get("machine", {}).get("cpu", {}).get("cores", "?")
    if taken := source.get("cores_taken"):
        before, *after = (f"{value:.1f}" for value in taken)
        return f"took {before} of {cores} cores before it began" + (f", {after[-1]} meanwhile" if after else "")
    return f"load {source['load']:.1f} on {cores} cores before it began" if source.get("load") is not None else ""
