"""What `onelaunch bench` prints of one case: its contenders in a table, and remarks."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from onelaunch.bench.busy import BUSY, remark
from onelaunch.bench.case import FLOOR, OURS
from onelaunch.cli.table import print_line, print_table
from onelaunch.cli.tabular import show_errors
from onelaunch.format import format_bytes, format_joules, format_seconds
from onelaunch.report.benchmark import undecided


def show_case(console: Console, result: dict[str, Any]) -> None:
    if result["check"] != "passed":
        if not result["check"].startswith("skipped"):  # skipped cases are counted at the end
            print_line(console, f"{result['name']}: check {result['check']}; not timed", "red")
        return
    extras = [name for name in ("peak_bytes", "joules") if result.get(name)]
    head = ["", f"median\nper {result['unit']}", "minimum", "quartiles", "n", "spread", "onelaunch is"]
    heads = {"peak_bytes": "peak\nmemory", "joules": f"energy\nper {result['unit']}"}
    head += [heads[name] for name in extras]
    rows = [
        [name, format_seconds(timing["median"]), format_seconds(timing["minimum"]),
         " – ".join(map(format_seconds, timing["quartiles"])), str(timing["n"]), f"{timing['spread']:.1%}",
         _our_speed(result, name), *(_extra(result, extra, name) for extra in extras)]
        for name, timing in result["times"].items()
    ]  # fmt: skip
    print_table(console, f"{result['name']}: {result['about']}", head, rows)
    if result.get("busy"):
        print_line(console, remark(result["cores_taken"]), "yellow")
    for name, factor in ({} if result.get("busy") else undecided(result)).items():
        line = f"too noisy to tell from {name}: {_ratio(result['ratio'][name])}, and the spreads allow {factor:.2f}×"
        print_line(console, line, "yellow")
    for name, text in result["notes"].items():
        print_line(console, f"{name}: {text}")
    if result.get("errors"):
        show_errors(console, result)
    for name, reason in result["absent"].items():
        print_line(console, f"absent: {name} ({reason})")
    if result["floor_share"] is not None:
        print_line(console, f"{result['floor_share']:.0%} of the bound's speed")
    if result.get("gpu"):
        print_line(console, _clocks(result["gpu"]))


def _our_speed(result: dict[str, Any], name: str) -> str:
    if name == OURS or name.startswith(FLOOR):
        return ""
    if result.get("busy"):
        return BUSY
    return ("≈ " if name in undecided(result) else "") + _ratio(result["ratio"][name])


def _ratio(ratio: float) -> str:
    return f"{ratio:.2f}× faster" if ratio >= 1 else f"{1 / ratio:.2f}× slower"


def _extra(result: dict[str, Any], extra: str, name: str) -> str:
    value = result[extra].get(name)
    if value is None:
        return ""
    return format_bytes(value) if extra == "peak_bytes" else format_joules(value)


def _clocks(gpu: dict[str, Any]) -> str:
    before, after = gpu["before"], gpu["after"]
    held = sorted({*before["held_back_by"], *after["held_back_by"]})
    line = (
        f"clock {before['sm_mhz']} MHz before, {after['sm_mhz']} after, {after['celsius']} °C, {after['watts']:.0f} W"
    )
    return line + (f"; held back by {', '.join(held)}" if held else "")
