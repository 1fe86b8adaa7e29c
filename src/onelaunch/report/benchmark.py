"""The sections of benchmark results: one table per group, bars against the peers, the roofline, energy, memory."""

from __future__ import annotations

import math
from typing import Any

from onelaunch.bench.busy import BUSY
from onelaunch.bench.case import FLOOR, OURS, group_of
from onelaunch.format import (
    NONE,
    format_bytes,
    format_joules,
    format_number,
    format_percent,
    format_ratio,
    format_seconds,
    format_si,
)
from onelaunch.report.draw import Bar, Line, bar_chart, line_chart
from onelaunch.report.figure import Figure, Section, Table
from onelaunch.report.machine import busy, machine_facts
from onelaunch.report.palette import Palette
from onelaunch.report.read import Source, unfinished

MAX_WATTS = 1000  # no card draws more


def bench_sections(source: Source, identity: str, palette: Palette) -> list[Section]:
    content = source.content
    name = f"{source.name}, unfinished" if unfinished(content) else source.name
    groups = list(dict.fromkeys(case["group"] for case in content["cases"]))
    if not groups:
        statements = [("note", "No case is finished."), *_statements([], content)]
        return [Section(identity, f"Benchmark {name}", machine_facts(content), statements=statements)]
    sections = []
    for position, group in enumerate(groups, 1):
        cases = [case for case in content["cases"] if case["group"] == group]
        timed = [case for case in cases if case["check"] == "passed" and has_times(case)]
        command = content.get("command") or f"onelaunch bench {group}{' --quick' if content.get('quick') else ''}"
        part = f"{identity}-{position}"
        facts = [*machine_facts(content), ("command", command)]
        figures = [_bars(case, f"{part}-{number}", command, palette) for number, case in enumerate(timed)]
        roofline = _roofline(timed, content.get("ceilings", {}), part, command, palette)
        figures += [extra for extra in (roofline, _energy(timed, part, command, palette)) if extra]
        if group == "memory":
            peaks = [case for case in timed if case.get("peak_bytes")]
            figures += [_memory(case, f"{part}-{number}", command, palette) for number, case in enumerate(peaks)]
        title = group_of(group).title
        tables = [group_table(timed, title)] if timed else []
        sections.append(Section(part, f"{title} ({name})", facts, tables, figures, _statements(cases, content)))
    return sections


def has_times(case: dict[str, Any]) -> bool:
    """Whether the case was timed, and all its times and spreads are valid numbers."""
    figures = [(timing["median"], timing["spread"]) for timing in case["times"].values()]
    numbers = all(isinstance(figure, int | float) for pair in figures for figure in pair)
    return bool(figures) and numbers and all(0 < median < math.inf and 0 <= off < math.inf for median, off in figures)


def ratio_of(case: dict[str, Any], peer: str) -> float:
    """A contender's time divided by ours, computed from the times, whatever ratio the file states."""
    return float(case["times"][peer]["median"] / case["times"][OURS]["median"])


def peers_of(cases: list[dict[str, Any]]) -> list[str]:
    """All peers that were timed in some case, in the order of their first appearance, without floors."""
    names = dict.fromkeys(name for case in cases for name in case["times"])
    return [name for name in names if name != OURS and not name.startswith(FLOOR)]


def undecided(case: dict[str, Any]) -> dict[str, float]:
    """Peers whose time differs from ours by less than the two spreads allow, with the allowed factor; all of them where others
    used the cores meanwhile."""
    if case.get("busy"):
        return dict.fromkeys(peers_of([case]), math.inf)
    spread = {name: timing["spread"] for name, timing in case["times"].items()}
    allowed = {peer: (1 + spread[OURS]) * (1 + spread[peer]) for peer in peers_of([case])}
    return {peer: factor for peer, factor in allowed.items() if 1 / factor <= ratio_of(case, peer) <= factor}


def against(case: dict[str, Any], peer: str) -> str:
    """A peer's time divided by ours: `2.43×`; `≈ 1.02×` where the difference is within the spreads; no number where others
    used the cores meanwhile."""
    if peer not in case["times"]:
        return NONE
    if case.get("busy"):
        return BUSY
    return f"{'≈ ' if peer in undecided(case) else ''}{format_ratio(ratio_of(case, peer))}"


def energy_of(case: dict[str, Any]) -> dict[str, float]:
    """Joules per unit of each contender. Empty for old recordings that include time in which the card waited for the host
    (see `bench/energy.py`): some contender would have drawn more power than any card does."""
    used = case.get("joules") or {}
    plausible = all(value <= MAX_WATTS * case["times"][name]["median"] for name, value in used.items())
    return used if plausible else {}


def group_table(cases: list[dict[str, Any]], title: str) -> Table:
    peers = peers_of(cases)
    shares, memory = (any(case.get(key) for case in cases) for key in ("floor_share", "peak_bytes"))
    energy = any(energy_of(case) for case in cases)
    clocks = any(case.get("gpu") for case in cases)
    head = ["case", "onelaunch", "spread", "n", *(f"against {peer}" for peer in peers)]
    optional = {"share of the bound's speed": shares, "peak memory": memory, "energy": energy, "clock": clocks}
    head += [name for name, shown in optional.items() if shown]
    rows = []
    for case in cases:
        ours = case["times"][OURS]
        row = [case["name"], f"{format_seconds(ours['median'])} per {case['unit']}"]
        row += [format_percent(ours["spread"]), str(ours["n"]), *(against(case, peer) for peer in peers)]
        row += [format_percent(case.get("floor_share"), 0)] * shares
        row += [format_bytes((case.get("peak_bytes") or {}).get(OURS))] * memory
        row += [format_joules(energy_of(case).get(OURS))] * energy
        rows.append(row + [_clock(case.get("gpu"))] * clocks)
    caption = f"{title}: median time, and how many times faster than each peer (below 1× the peer is faster"
    close = "; ≈: too noisy to tell" if any("≈" in cell for row in rows for cell in row) else ""
    return Table(f"{caption}{close})", head, rows)


def _clock(gpu: dict[str, Any] | None) -> str:
    if not gpu:
        return NONE
    before, after = gpu["before"], gpu["after"]
    held = sorted({*before["held_back_by"], *after["held_back_by"]})
    return f"{before['sm_mhz']} → {after['sm_mhz']} MHz" + (f", {', '.join(held)}" if held else "")


def _statements(cases: list[dict[str, Any]], content: dict[str, Any]) -> list[tuple[str, str]]:
    """What to say about cases besides their figures: (good, bad or note, words)."""
    statements = []
    for case in cases:
        if case["check"].startswith("failed"):
            statements.append(("bad", f"{case['name']} failed its check and was not timed: {case['check'][8:]}"))
        elif case["times"] and not has_times(case):
            statements.append(("bad", f"{case['name']} is left out: some of its times are not valid"))
    if loud := [case["name"] for case in cases if case.get("busy")]:
        statements.append(("bad", f"Machine busy: others used the cores while these were timed: {', '.join(loud)}"))
    skipped = [case for case in cases if case["check"].startswith("skipped")]
    if skipped:
        count = "1 case was" if len(skipped) == 1 else f"{len(skipped)} cases were"
        statements.append(("note", f"{count} skipped: {skipped[0]['check'][9:]}"))
    doubtful = [case["name"] for case in cases if case.get("joules") and not energy_of(case)]
    if doubtful:
        statements.append(("note", f"Energy left out, because it includes the host's time: {', '.join(doubtful)}"))
    absent: dict[str, str] = {}
    for case in cases:
        absent |= case.get("absent") or {}
    statements += [("note", f"Absent: {name} ({reason})") for name, reason in absent.items()]
    if content.get("quick"):
        statements.append(("note", "Taken with --quick: few repeats, and a minute per group."))
    groups = {case["group"] for case in cases}
    if left_out := [name for name in content.get("left_out", ()) if not groups or name.split("/")[0] in groups]:
        statements.append(("note", f"Left out, because the time was over: {', '.join(left_out)}"))
    return [*statements, *busy(content), *unfinished(content)]


def _kind(name: str) -> str:
    return "ours" if name == OURS else "floor" if name.startswith(FLOOR) else "bar"


def _colour(name: str, palette: Palette) -> int | None:
    """Ours has its colour of the palette, because the roofline shows it too; peers have none."""
    return palette.look(OURS).colour if name == OURS else None


def _bars(case: dict[str, Any], identity: str, command: str, palette: Palette) -> Figure:
    bars = []
    for name, timing in case["times"].items():
        ratio = f", {against(case, name)}" if _kind(name) == "bar" else ""
        low, high = timing["quartiles"]
        words, colour = format_seconds(timing["median"]) + ratio, _colour(name, palette)
        bars.append(Bar(name, timing["median"], words, low, high, _kind(name), colour))
    bars.sort(key=lambda bar: bar.value)
    svg = bar_chart(f"{identity}-time", case["name"], bars, what=f"Median time per {case['unit']}")
    head = ["contender", "median", "minimum", "quartiles", "n", "spread", "peak memory", "energy"]
    rows = [
        [name, format_seconds(t["median"]), format_seconds(t["minimum"]), " – ".join(map(format_seconds, t["quartiles"])),
         str(t["n"]), format_percent(t["spread"]), format_bytes((case.get("peak_bytes") or {}).get(name)),
         format_joules(energy_of(case).get(name))]
        for name, t in case["times"].items()
    ]  # fmt: skip
    notes = [f"{name}: {words}" for name, words in (case.get("notes") or {}).items()]
    note = " ".join(f"{sentence}." for sentence in (case["about"], *notes))
    return Figure(case["name"], svg, Table(f"{case['name']}, per {case['unit']}", head, rows), command, note)


def _roofline(
    cases: list[dict[str, Any]], ceilings: dict[str, Any], identity: str, command: str, palette: Palette
) -> Figure | None:
    points = [(c, *place) for c in cases if (place := _on_roofline(c, ceilings))]
    if not points:
        return None
    kind = "cuda" if points[0][0].get("gpu") or "cuda" in ceilings else "cpu"
    bandwidth = ceilings[kind]["copy"]
    intensities = [x for _, x, _ in points]
    names = [c["name"] for c, _, _ in points]
    lines = [Line(OURS, intensities, [y for _, _, y in points], dots=names)]
    for dtype in sorted({c["dtype"] for c, _, _ in points} & ceilings[kind].keys()):
        peak = ceilings[kind][dtype]
        low, high = min([*intensities, peak / bandwidth / 4]), max([*intensities, peak / bandwidth * 4])
        bend = peak / bandwidth
        lines.append(Line(f"ceiling, {dtype}", [low, bend, high], [low * bandwidth, peak, peak]))
    svg = line_chart(
        f"{identity}-roofline", "Roofline", lines, x_label="FLOPs per byte that must move", y_label="FLOPs per second",
        log_x=True, log_y=True, write_y=lambda value, figures=3: format_si(value, "", figures), palette=palette,
    )  # fmt: skip
    rows = [
        [c["name"], format_number(x), format_si(y, "FLOP/s"), format_percent(c.get("floor_share"), 0)]
        for c, x, y in points
    ]
    rate = format_si(bandwidth, "B/s")
    note = f"The slope is the copy of a large tensor, {rate} here; the flat part is a large matrix product."
    table = Table("Roofline", ["case", "FLOPs per byte", "reached", "share of the bound's speed"], rows)
    return Figure("Roofline", svg, table, command, note, names)


def _on_roofline(case: dict[str, Any], ceilings: dict[str, Any]) -> tuple[float, float] | None:
    """FLOPs per byte and FLOPs per second of a case; None where the file does not hold them."""
    work = case.get("work") or {}
    if not (work.get("bytes") and work.get("flops")) or not any("copy" in found for found in ceilings.values()):
        return None
    return work["flops"] / work["bytes"], work["flops"] / case["times"][OURS]["median"]


def _energy(cases: list[dict[str, Any]], identity: str, command: str, palette: Palette) -> Figure | None:
    """The energy of the most frugal peer divided by ours, one bar per case."""
    bars, rows = [], []
    for case in cases:
        used = energy_of(case)
        others = {name: used[name] for name in peers_of([case]) if name in used}
        if OURS not in used or not others:
            continue
        frugal = min(others, key=lambda name: others[name])
        ratio = others[frugal] / used[OURS]
        kind, colour = ("ours", _colour(OURS, palette)) if ratio >= 1 else ("bar", None)
        label = case["name"].removeprefix(f"{case['group']}/")
        bars.append(Bar(label, ratio, f"{format_ratio(ratio)} ({frugal})", kind=kind, colour=colour))
        rows.append(
            [case["name"], format_joules(used[OURS]), frugal, format_joules(others[frugal]), format_ratio(ratio)]
        )
    if not bars:
        return None
    what = "Energy of the most frugal peer over ours"
    svg = bar_chart(f"{identity}-energy", "Energy", bars, what=what)
    table = Table("Energy", ["case", "onelaunch", "most frugal peer", "its energy", "ratio"], rows)
    return Figure("Energy", svg, table, command, f"{what}: longer bars are better here.")


def _memory(case: dict[str, Any], identity: str, command: str, palette: Palette) -> Figure:
    peaks = case["peak_bytes"]
    bars = [
        Bar(name, float(v), format_bytes(v), kind=_kind(name), colour=_colour(name, palette))
        for name, v in peaks.items()
        if math.isfinite(v)
    ]
    svg = bar_chart(f"{identity}-peak", f"{case['name']}: peak memory", bars, what="Peak memory")
    rows = [[name, format_bytes(value), f"{value:,}"] for name, value in peaks.items()]
    table = Table("Peak memory", ["contender", "peak", "bytes"], rows)
    return Figure(f"{case['name']}: peak memory", svg, table, command)
