"""The section of a comparison: the same training run by every contender."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onelaunch.bench.busy import BUSY
from onelaunch.format import (
    NONE,
    format_bytes,
    format_count,
    format_number,
    format_percent,
    format_ratio,
    format_seconds,
)
from onelaunch.integers import ceil_div
from onelaunch.report.draw import Bar, Line, bar_chart, line_chart, nan_for_null
from onelaunch.report.figure import Figure, Section, Table
from onelaunch.report.machine import busy, machine_facts
from onelaunch.report.palette import Palette
from onelaunch.report.read import Source, unfinished
from onelaunch.report.remarks import absences, is_ours, remarks
from onelaunch.report.scale import is_wide

NOISY = 1.5  # slowest divided by fastest
VAGUE = 0.5  # a gap within a bound this wide says nothing


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
        figures += [
            _curves(found, identity, command, content, palette),
            _bars(found, identity, command, content, palette),
        ]
    if content.get("memory"):
        figures.append(_memory(content["memory"], identity, command, palette))
    if (content.get("sizes") or {}).get("step_seconds"):
        figures += size_figures(content["sizes"], identity, command, palette, busy=bool(content.get("busy")))
    statements = agreement(content["contenders"])
    statements.sort(key=lambda entry: not is_ours(entry[1]))  # the words begin with the contender's name
    statements += [*remarks(content), *noise(content)]
    statements += [] if found else [("note", "No contender is finished yet.")]
    statements += [*busy(content), *unfinished(content)]
    statements += [("note", f"Absent: {words}") for words in absences(content)]
    title = f"Comparison {source.name}{' (unfinished)' if unfinished(content) else ''}"
    return Section(identity, title, facts, tables, figures, statements)


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
    head = ["contender", "per step", "per epoch", "start-up", "peak memory", "final loss", "final accuracy"]
    ours = frozenset(number for number, name in enumerate(found) if is_ours(name))
    caption = "The same run by all contenders: medians over the epochs; final figures on the validation rows"
    return Table(caption, head, rows, ours)


def _mean(value: dict[str, float] | None, share: bool = False) -> str:
    if value is None or value["mean"] is None:
        return NONE
    write = (lambda v: format_percent(v, 2)) if share else format_number
    return write(value["mean"]) + (f" ± {write(value['deviation'])}" if value["n"] > 1 else "")


def agreement(found: dict[str, Any]) -> list[tuple[str, str]]:
    """One sentence per contender: whether its loss curve agrees with the reference's."""
    statements = []
    reference = next((name for name, one in found.items() if one["gap"] is None), "")
    for name, one in found.items():
        gap = one["gap"]
        if gap is None:
            continue
        vague = gap["agrees"] and gap["bound"] > VAGUE
        verdict = "cannot be told from" if vague else "agrees with" if gap["agrees"] else "does not agree with"
        where = f"steps {gap['first_step'] + 1:,} to {gap['last_step'] + 1:,}"
        gap_words = f"{format_percent(gap['relative'], 2)} ({where}; bound {format_percent(gap['bound'], 2)}"
        words = f"{name} {verdict} {reference}: largest gap of smoothed losses {gap_words}"
        words += ", the losses vary too much)" if vague else ")"
        statements.append(("note" if vague else "good" if gap["agrees"] else "bad", words))
    return statements


def noise(content: dict[str, Any]) -> list[tuple[str, str]]:
    """Contenders whose times are unreliable: the slowest epoch or sample took NOISY times as long as the fastest, or longer."""
    by_size = (content.get("sizes") or {}).get("step_seconds", {})
    timed = [(name, "", one["step_seconds"]) for name, one in content["contenders"].items()]
    timed += [(name, f" at size {size}", t) for name, sizes in by_size.items() for size, t in sizes.items()]
    noisy = [
        (f"{name}{where}", format_seconds(t["minimum"]), format_seconds(t["maximum"]))
        for name, where, t in timed
        if t["maximum"] > NOISY * t["minimum"]
    ]
    return [("bad", f"The machine was busy: {who} took {low} to {high} per step") for who, low, high in noisy]


def _curves(found: dict[str, Any], identity: str, command: str, content: dict[str, Any], palette: Palette) -> Figure:
    several = len(content.get("seeds", [])) > 1
    lines = []
    for name, one in found.items():
        mean, low, high = (nan_for_null(one["curve"][key]) for key in ("mean", "low", "high"))
        lines.append(Line(name, one["curve"]["steps"], mean, low if several else (), high if several else ()))
    wide = is_wide(value for line in lines for value in line.y)
    svg = line_chart(
        f"{identity}-curves", "Loss curves", lines, x_label="step", y_label="loss, mean over some steps", log_y=wide,
        palette=palette,
    )  # fmt: skip
    rows = [[f"{step:,}", *(format_number(line.y[i]) for line in lines)] for i, step in _thinned(lines[0].x)]
    note = "Bands run from the smallest to the largest seed." if several else ""
    return Figure("Loss curves", svg, Table("Loss by step", ["step", *found], rows), command, note)


def _thinned(values: Sequence[float], most: int = 20) -> list[tuple[int, float]]:
    """At most `most` of the values, evenly spaced and with the last one, each with its index."""
    stride = max(1, ceil_div(len(values), most))
    return [(i, values[i]) for i in range(stride - 1, len(values), stride)]


def _bars(found: dict[str, Any], identity: str, command: str, content: dict[str, Any], palette: Palette) -> Figure:
    ours = min((one["step_seconds"]["median"] for name, one in found.items() if is_ours(name)), default=None)
    bars = []
    for name, one in found.items():
        t = one["step_seconds"]
        ratio = BUSY if content.get("busy") else format_ratio(t["median"] / ours) if ours else ""
        factor = "" if ours in (None, t["median"]) else f", {ratio}"
        kind = "ours" if is_ours(name) else "bar"
        words, colour = f"{format_seconds(t['median'])}{factor}", palette.look(name).colour
        bars.append(Bar(name, t["median"], words, t["minimum"], t["maximum"], kind, colour))
    bars.sort(key=lambda bar: bar.value)
    svg = bar_chart(f"{identity}-bars", "Time of a step", bars, what="Time of a step")
    keys = ("median", "minimum", "maximum")
    rows = [
        [name, *(format_seconds(one["step_seconds"][key]) for key in keys), str(one["step_seconds"]["n"])]
        for name, one in found.items()
    ]
    table = Table("Time of a step", ["contender", *keys, "epochs"], rows)
    return Figure("Time of a step", svg, table, command, "Whiskers run from the fastest to the slowest epoch.")


def _memory(memory: dict[str, Any], identity: str, command: str, palette: Palette) -> Figure:
    longest = max((len(one["bytes"]) for one in memory.values() if "bytes" in one), default=1)
    lines, rows = [], []
    for name, one in sorted(memory.items(), key=lambda entry: not is_ours(entry[0])):
        values = one["bytes"] if "bytes" in one else [one["flat"]] * 2
        operations = list(range(1, len(values) + 1)) if "bytes" in one else [1, longest]
        lines.append(Line(name, operations, [value / 2**20 for value in values], steps=True))
        rows.append(
            [name, format_bytes(min(values)), format_bytes(max(values)), str(len(values)) if "bytes" in one else "none"]
        )
    svg = line_chart(
        f"{identity}-memory", "Memory over a step", lines, x_label="operation of the step", y_label="MiB alive",
        from_zero=True, write_x=format_count, palette=palette,
    )  # fmt: skip
    note = (
        "Weights, gradients, optimizer state, batch and activations, without the data set. A flat line is an arena laid out "
        "before the first step. Captured, compiled and resident steps are not shown: their memory cannot be watched this way."
    )
    table = Table("Memory over a step", ["contender", "minimum", "maximum", "operations that allocate or free"], rows)
    return Figure("Memory over a step", svg, table, command, note)


def size_figures(
    sizes: dict[str, Any], identity: str, command: str, palette: Palette | None = None, *, busy: bool = False
) -> list[Figure]:
    """The time of a step over the hidden size, and the speed-up of the chosen engine over each peer.

    `busy`: others used the cores meanwhile, so that there is no speed-up to show.
    """
    palette = palette or Palette()
    hidden = sorted(set(sizes["hidden"]))
    measured = dict(sorted(sizes["step_seconds"].items(), key=lambda entry: not is_ours(entry[0])))
    lines = []
    for name, by_size in measured.items():
        timed = [size for size in hidden if str(size) in by_size]
        median, low, high = ([by_size[str(size)][key] for size in timed] for key in ("median", "minimum", "maximum"))
        lines.append(Line(name, timed, median, low, high))
    rows = [
        [f"{size:,}", *(format_seconds(measured[name].get(str(size), {}).get("median")) for name in measured),
         sizes["auto"].get(str(size), NONE).removeprefix("onelaunch ")]
        for size in hidden
    ]  # fmt: skip
    table = Table("Time of a step by hidden size", ["hidden size", *measured, "chosen engine"], rows)
    svg = line_chart(
        f"{identity}-sizes", "Time of a step over hidden size", lines, x_label="hidden size", y_label="time of a step",
        log_x=True, log_y=True, write_y=format_seconds, write_x=format_count, x_ticks=hidden, palette=palette,
    )  # fmt: skip
    figures = [Figure("Time of a step over hidden size", svg, table, command)]
    ratios = {} if busy else speed_up(sizes)
    if ratios:
        lines = [Line(name, list(by_size), list(by_size.values())) for name, by_size in ratios.items()]
        svg = line_chart(
            f"{identity}-speedup", "Speed-up over hidden size", lines, x_label="hidden size",
            y_label="times faster than", log_x=True, log_y=True, write_y=format_ratio, write_x=format_count, x_ticks=hidden,
            palette=palette,
        )  # fmt: skip
        rows = [[f"{size:,}", *(format_ratio(by_size.get(size)) for by_size in ratios.values())] for size in hidden]
        table = Table("How many times faster the chosen engine is than each", ["hidden size", *ratios], rows)
        note = "Of the engine that auto chooses at each size, or that was requested; below 1× the other is faster."
        figures.append(Figure("Speed-up over hidden size", svg, table, command, note))
    return figures


def speed_up(sizes: dict[str, Any]) -> dict[str, dict[int, float]]:
    """Each peer's time divided by that of the chosen engine, by hidden size."""
    found: dict[str, dict[int, float]] = {}
    for size in sorted(set(sizes["hidden"])):
        auto = sizes["step_seconds"].get(sizes["auto"].get(str(size), ""), {}).get(str(size))
        for name, by_size in sizes["step_seconds"].items():
            if auto and not is_ours(name) and str(size) in by_size:
                found.setdefault(name, {})[size] = by_size[str(size)]["median"] / auto["median"]
    return found
