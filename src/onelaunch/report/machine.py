"""The machine that results come from, as facts for the page."""

from __future__ import annotations

from typing import Any

from onelaunch.device import BUSY_SHARE

PACKAGES = ("torch", "triton", "cuda-core", "llvmlite", "jax", "scikit-learn")


def chip(machine: dict[str, Any], gpu: bool = True) -> str:
    """The name of the GPU if there is one and `gpu` is True, else of the CPU with its threads."""
    if gpu and machine.get("gpus"):
        return str(machine["gpus"][0]["name"])
    cpu = machine.get("cpu", {})
    return f"{cpu.get('name', 'unknown CPU')}, {cpu.get('torch_threads', '?')} threads"


def machine_facts(source: dict[str, Any]) -> list[tuple[str, str]]:
    """(name, value) pairs; an empty value is not known."""
    machine = source.get("machine", {})
    versions = machine.get("versions", {})
    found = [f"{name} {versions[name]}" for name in PACKAGES if versions.get(name, "absent") != "absent"]
    driver = f", driver {machine['driver']}" if machine.get("driver") else ""
    return [
        ("machine", chip(machine) + driver),
        ("its CPU", chip(machine, gpu=False) if machine.get("gpus") else ""),
        ("system", f"{machine.get('system', '')}, Python {versions.get('python', '?')}" if machine else ""),
        ("versions", ", ".join([f"onelaunch {versions.get('onelaunch', '?')}", *found]) if versions else ""),
        ("commit", source.get("commit", "")),
        ("source tree", source.get("source", "")),
        ("date", source.get("date", "")),
        ("other processes", _others(source)),
    ]


def busy(source: dict[str, Any]) -> list[tuple[str, str]]:
    """A statement about results that were taken while other processes used the machine; `bench` warns at the same share."""
    cores = source.get("machine", {}).get("cpu", {}).get("cores") or 0
    of_cases = [case.get("cores_taken") for case in source.get("cases") or ()]
    if of_cases and None not in of_cases:
        taken = max(of_cases)  # while contenders were timed: others may compile before, and wait meanwhile
    else:
        taken = (source.get("cores_taken") or [0])[-1]  # during the whole run
    if not cores or taken <= BUSY_SHARE * cores:
        return []
    words = f"The machine was busy: other processes used {taken:.1f} of {cores} cores."
    return [("bad", f"{words} Times may be far off, most of all those of the peers.")]


def _others(source: dict[str, Any]) -> str:
    """The cores that other processes used. Older results have the load average instead."""
    cores = source.get("machine", {}).get("cpu", {}).get("cores", "?")
    if taken := source.get("cores_taken"):
        before, *after = (f"{value:.1f}" for value in taken)
        return f"used {before} of {cores} cores before the start" + (f", {after[-1]} during the run" if after else "")
    return f"load {source['load']:.1f} on {cores} cores before the start" if source.get("load") is not None else ""
