"""The section of a comparison: the same run by everybody."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onelaunch.format import (
    NONE,
    format_bytes,
    format_count,
    format_number,
    format_percent,
    format_ratio,
    format_seconds,
)
from onelaunch.report.draw import Bar, Line, bar_chart, known, line_chart
from onelaunch.report.figure import Figure, Section, Table
from onelaunch.report.machine import busy, machine_facts
from onelaunch.report.palette import Palette
from onelaunch.report.read import Source, unfinished
from onelaunch.report.remarks import absences, is_ours, remarks
from onelaunch.report.scale import is_wide

NOISY = 1.5  # slowest over fastest
VAGUE = 0.5  # a bound so wide that to stay within it says nothing


def compare_section(source: Source, identity: str, palette: Palette) -> Section:
    content = source.content
    command = content.get("command", "")
    found = dict(sorted(content["contenders"].items(), key=lambda entry: not is_ours(entry[0])))  # ours first
    facts = [
        ("network", content.get("network", "")),
        ("data", content.get("data", "")),
        ("run", _run_words(content)),
        *machine_facts(content),
    ]
    figures: list[Figure] = []
    tables: list[Table] = []
    if found:
        tables.append(comparison_table(found))
        figures += [_curves(found, identity, command, content, palette), _bars(found, identity, command, palette)]
    if content.get("memory"):
        figures.append(_memory(content["memory"], identity, command, palette))
    if (content.get("sizes") or {}).get("step_seconds"):
        figures += size_figures(content["sizes"], identity, command, palette)
    said = sorted(
        agreement(content["contenders"]), key=lambda entry: not is_ours(entry[1])
    )  # which begin with the name
    said += [*remarks(content), *noise(content)]
    said += [] if found else [("note", "No contender is finished yet.")]
    said += [*busy(content), *unfinished(content)]
    said += [("note", f"Absent: {words}") for words in absences(content)]
    title = f"Comparison {source.name}{' (unfinished)' if unfinished(content) else ''}"
    return Section(identity, title, facts, tables, figures, said)


def _run_words(content: dict[str, Any]) -> str:
    if "steps" not in content:
        return ""
    seeds = content.get("seeds", [])
    per_seed = f", seeds {', '.join(map(str, seeds))}" if len(seeds) > 1 else ""
    return f"{content['steps']:,} steps of {content['batch_size']} rows out of {content['rows']:,}{per_seed}"


def comparison_table(found: dict[str, Any]) -> Table:
    rows = []
    for name, one in found.items():
        final, epoch = one["final"], one["epoch_seconds"]
        rows.append(
            [name, format_seconds(one["step_seconds"]["median"]), format_seconds(epoch["median"] if epoch else None),
             format_seconds(one["startup_seconds"]), format_bytes(one["peak_bytes"]), _mean(final["loss"]),
             _mean(final["accuracy"], share=True)]
        )  # fmt: skip
    head = ["contender", "a step", "an epoch", "start-up", "peak memory", "final loss", "final accuracy"]
    ours = frozenset(number for number, name in enumerate(found) if is_ours(name))
    return Table(
        "Everybody, the same run: medians over the epochs; final figures on the validation rows", head, rows, ours
    )


def _mean(value: dict[str, float] | None, share: bool = False) -> str:
    if value is None or value["mean"] is None:
        return NONE
    write = (lambda v: format_percent(v, 2)) if share else format_number
    return write(value["mean"]) + (f" ± {write(value['deviation'])}" if value["n"] > 1 else "")


def agreement(found: dict[str, Any]) -> list[tuple[str, str]]:
    """A sentence for each contender: does its loss curve tell the same story as the reference's?"""
    said = []
    reference = next((name for name, one in found.items() if one["gap"] is None), "")
    for name, one in found.items():
        gap = one["gap"]
        if gap is None:
            continue
        vague = gap["agrees"] and gap["bound"] > VAGUE
        found_so = "cannot be told from" if vague else "agrees with" if gap["agrees"] else "does not agree with"
        where = f"steps {gap['first_step'] + 1:,} to {gap['last_step'] + 1:,}"
        words = (
            f"{name} {found_so} {reference}: largest gap of smoothed losses {format_percent(gap['relative'], 2)} ({where}; bound "
            f"{format_percent(gap['bound'], 2)}{', the losses vary too much' if vague else ''})"
        )
        said.append(("note" if vague else "good" if gap["agrees"] else "bad", words))
    return said


def noise(content: dict[str, Any]) -> list[tuple[str, str]]:
    """Whose times cannot be believed: the same work took half as long again in another epoch or sample."""
    by_size = (content.get("sizes") or {}).get("step_seconds", {})
    timed = [(name, "", one["step_seconds"]) for name, one in content["contenders"].items()]
    timed += [(name, f" at size {size}", t) for name, sizes in by_size.items() for size, t in sizes.items()]
    return [
        (
            "bad",
            f"The machine was busy: {name}{where} took {format_seconds(t['minimum'])} to {format_seconds(t['maximum'])} a step",
        )
        for name, where, t in timed
        if t["maximum"] > NOISY * t["minimum"]
    ]


def _curves(found: dict[str, Any], identity: str, command: str, content: dict[str, Any], palette: Palette) -> Figure:
    several = len(content.get("seeds", [])) > 1
    lines = [
        Line(
            name, c["steps"], known(c["mean"]), known(c["low"] if several else ()), known(c["high"] if several else ())
        )
        for name, c in ((name, one["curve"]) for name, one in found.items())
    ]
    wide = is_wide(value for line in lines for value in line.y)
    svg = line_chart(
        f"{identity}-curves", "Loss curves", lines, x_label="step", y_label="loss, mean of a stretch", log_y=wide,
        palette=palette,
    )  # fmt: skip
    rows = [[f"{step:,}", *(format_number(line.y[i]) for line in lines)] for i, step in _thinned(lines[0].x)]
    note = "Bands run from the least to the largest seed." if several else ""
    return Figure("Loss curves", svg, Table("Loss by step", ["step", *found], rows), command, note)


def _thinned(values: Sequence[float], most: int = 20) -> list[tuple[int, float]]:
    stride = max(1, -(-len(values) // most))
    return [(i, values[i]) for i in range(stride - 1, len(values), stride)]


def _bars(found: dict[str, Any], identity: str, command: str, palette: Palette) -> Figure:
    ours = min((one["step_seconds"]["median"] for name, one in found.items() if is_ours(name)), default=None)
    bars = []
    for name, one in found.items():
        t = one["step_seconds"]
        factor = "" if ours in (None, t["median"]) else f", {format_ratio(t['median'] / ours)}"
        kind = "ours" if is_ours(name) else "bar"
        words, colour = f"{format_seconds(t['median'])}{factor}", palette.look(name).colour
        bars.append(Bar(name, t["median"], words, t["minimum"], t["maximum"], kind, colour))
    bars.sort(key=lambda bar: bar.value)
    svg = bar_chart(f"{identity}-bars", "Time of a step", bars, what="Time of a step")
    rows = [
        [
            name,
            *(format_seconds(one["step_seconds"][key]) for key in ("median", "minimum", "maximum")),
            str(one["step_seconds"]["n"]),
        ]
        for name, one in found.items()
    ]
    table = Table("Time of a step", ["contender", "median", "least", "most", "epochs"], rows)
    return Figure("Time of a step", svg, table, command, "Whiskers run from the fastest to the slowest epoch.")


def _memory(memory: dict[str, Any], identity: str, command: str, palette: Palette) -> Figure:
    longest = max((len(one["bytes"]) for one in memory.values() if "bytes" in one), default=1)
    lines, rows = [], []
    for name, one in sorted(memory.items(), key=lambda entry: not is_ours(entry[0])):
        values = one["bytes"] if "bytes" in one else [one["flat"]] * 2
        places = list(range(1, len(values) + 1)) if "bytes" in one else [1, longest]
        lines.append(Line(name, places, [value / 2**20 for value in values], steps=True))
        rows.append(
            [name, format_bytes(min(values)), format_bytes(max(values)), str(len(values)) if "bytes" in one else "none"]
        )
    svg = line_chart(
        f"{identity}-memory", "Memory over a step", lines, x_label="operation of the step", y_label="MiB alive",
        from_zero=True, write_x=format_count, palette=palette,
    )  # fmt: skip
    note = (
        "Weights, gradients, optimizer state, batch and activations, without the data set. A flat line is an arena laid out "
        "before the first step. Not of captured, compiled or resident steps, whose memory cannot be watched so."
    )
    table = Table("Memory over a step", ["contender", "least", "most", "operations that allocate or free"], rows)
    return Figure("Memory over a step", svg, table, command, note)


def size_figures(sizes: dict[str, Any], identity: str, command: str, palette: Palette | None = None) -> list[Figure]:
    """Time of a step over the hidden size, and the speed-up of the chosen engine."""
    palette = palette or Palette()
    hidden = sorted(set(sizes["hidden"]))
    measured = dict(sorted(sizes["step_seconds"].items(), key=lambda entry: not is_ours(entry[0])))
    lines = []
    for name, by_size in measured.items():
        known = [size for size in hidden if str(size) in by_size]
        values = [by_size[str(size)] for size in known]
        lines.append(
            Line(
                name,
                known,
                [v["median"] for v in values],
                [v["minimum"] for v in values],
                [v["maximum"] for v in values],
            )
        )
    rows = [
        [f"{size:,}", *(format_seconds(measured[name].get(str(size), {}).get("median")) for name in measured),
         sizes["auto"].get(str(size), "–").removeprefix("onelaunch ")]
        for size in hidden
    ]  # fmt: skip
    table = Table("Time of a step by hidden size", ["hidden size", *measured, "chosen engine"], rows)
    svg = line_chart(
        f"{identity}-sizes", "Time of a step over hidden size", lines, x_label="hidden size", y_label="time of a step",
        log_x=True, log_y=True, write_y=format_seconds, write_x=format_count, x_ticks=hidden, palette=palette,
    )  # fmt: skip
    figures = [Figure("Time of a step over hidden size", svg, table, command)]
    ratios = speed_up(sizes)
    if ratios:
        lines = [Line(name, list(by_size), list(by_size.values())) for name, by_size in ratios.items()]
        svg = line_chart(
            f"{identity}-speedup", "Speed-up over hidden size", lines, x_label="hidden size",
            y_label="times faster than", log_x=True, log_y=True, write_y=format_ratio, write_x=format_count, x_ticks=hidden,
            palette=palette,
        )  # fmt: skip
        rows = [[f"{size:,}", *(format_ratio(by_size.get(size)) for by_size in ratios.values())] for size in hidden]
        table = Table("How many times faster the chosen engine is than each", ["hidden size", *ratios], rows)
        note = "Of the engine that auto picks at each size, or that was asked for; below 1× the other is faster."
        figures.append(Figure("Speed-up over hidden size", svg, table, command, note))
    return figures


def speed_up(sizes: dict[str, Any]) -> dict[str, dict[int, float]]:
    """Each peer's time over that of the chosen engine, by size."""
    found: dict[str, dict[int, float]] = {}
    for size in sorted(set(sizes["hidden"])):
        auto = sizes["step_seconds"].get(sizes["auto"].get(str(size), ""), {}).get(str(size))
        for name, by_size in sizes["step_seconds"].items():
            if auto and not is_ours(name) and str(size) in by_size:
                found.setdefault(name, {})[size] = by_size[str(size)]["median"] / auto["median"]
    return found
