"""`docs/results.md`: every recorded case, beginning with those in which a peer is faster; also failures and absences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from textwrap import wrap
from typing import Any

from onelaunch.format import format_bytes, format_joules, format_percent, format_ratio, format_seconds
from onelaunch.report.benchmark import against, energy_of, peers_of, ratio_of
from onelaunch.report.comparison import size_figures
from onelaunch.report.draw import Bar, bar_chart
from onelaunch.report.errors_table import error_rows, error_summary
from onelaunch.report.recorded import Group, Recorded, Recordings, Sizes
from onelaunch.report.remarks import OURS, absences
from onelaunch.report.standalone import standalone

RESULTS, FIGURES = "benchmarks/results", "docs/figures"
INTRODUCTION = """\
# Results

`make readme` writes this page from `benchmarks/results/`: the newest recording of each case on each chip.
[measuring.md](measuring.md) says how the figures are taken.

- Times are medians. "against X" is X's time divided by ours: above 1× onelaunch is faster.
- ≈ marks a difference within the spread of the two: too noisy to tell.
- "% of the bound" compares our time with that of the bytes or the arithmetic of the case at the speed of a
  copy or a matrix product measured in the same run. It may exceed 100 %. Steps of small networks are limited
  by latency: a percent or less is normal for them.

## Where a peer is faster
"""


def results_page(recordings: Recordings) -> str:
    lines = [INTRODUCTION, *_lost(recordings), *_more_energy(recordings)]
    for group in recordings.groups:
        commands = dict.fromkeys(f"`{plain(record.command)}`" for record in (*group.cases, *group.failed))
        lines += ["", f"## {plain(f'{group.title}: {group.chip}')}", "", " · ".join(commands), ""]
        lines += _full_table(group) if group.cases else []
        lines += _errors([record.case for record in group.cases if record.case.get("errors")])
        if group.is_drawn:
            lines += ["", f"![{plain(_figure_title(group))}](figures/{group.file_stem}.svg)"]
        lines += _remarks(group)
    for sizes in recordings.sizes:
        lines += ["", f"## Over the hidden size: {plain(sizes.chip)}", "", *_over_size(sizes)]
    return "\n".join(part for line in lines for part in _wrapped(line)) + "\n"


def _wrapped(line: str) -> list[str]:
    """A line of prose or of a list in lines of at most 110 characters; tables, headings and images as they are."""
    if len(line) <= 110 or "\n" in line or line[0] in "|#!":
        return [line]
    return wrap(line, 110, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def group_figure(group: Group) -> str:
    """An SVG file: one bar per case, the fastest peer's time divided by ours."""
    bars = []
    for record in group.cases:
        if best := record.best_peer():
            name, ratio = best
            shown = against(record.case, name)
            wins = ratio >= 1 and "≈" not in shown
            bars.append(Bar(record.title, ratio, f"{shown} {name}", kind="ours" if wins else "bar"))
    heading = "The fastest peer's time divided by ours. Above 1× ours is faster."
    if any("≈" in bar.shown for bar in bars):
        heading += " ≈: too noisy to tell."
    what = "Time of the fastest peer divided by ours"
    return standalone(bar_chart(group.file_stem, _figure_title(group), bars, what=what, heading=heading, mark=1.0))


def _figure_title(group: Group) -> str:
    return f"{group.title} on {group.chip}: the fastest peer's time divided by ours"


def time_of(record: Recorded) -> str:
    """Our median time: `5.00 µs per step`."""
    return f"{format_seconds(record.case['times'][OURS]['median'])} per " + record.case["unit"]


def plain(words: str) -> str:
    """`words` escaped so that Markdown shows them as they are, also inside a table."""
    return escape(" ".join(words.split()), quote=False).replace("|", "\\|")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table; the cells may hold any text."""
    first, *others = (f"| {' | '.join(map(plain, cells))} |" for cells in (head, *rows))
    return [first, f"|{'---|' * len(head)}", *others]


def _lost(recordings: Recordings) -> list[str]:
    rows = [
        [record.case["name"], group.chip, peer, f"{'' if surely else '≈ '}{format_ratio(1 / ratio)} its time"]
        for group in recordings.groups
        for record in group.cases
        for peer, ratio, surely in record.behind()
    ]
    rows += [
        [f"{sizes.content['network']}, hidden size {hidden:,}", sizes.chip, peer, f"{format_ratio(1 / ratio)} its time"]
        for sizes in recordings.sizes
        for peer, hidden, ratio in sizes.lost_to()
    ]
    return table(["case", "chip", "peer", "onelaunch takes"], rows) if rows else ["In no recorded case."]


def _more_energy(recordings: Recordings) -> list[str]:
    """The cases in which a peer takes less energy, whichever is faster."""
    rows = [
        [record.case["name"], peer, format_joules(used[peer]), format_joules(used[OURS])]
        for group in recordings.groups
        for record in group.cases
        if OURS in (used := energy_of(record.case))
        for peer in peers_of([record.case])
        if peer in used and used[peer] < used[OURS]
    ]
    heading = ["", "## Where a peer takes less energy", ""]
    return [*heading, *table(["case", "peer", "its energy", "ours"], rows)] if rows else []


def _full_table(group: Group) -> list[str]:
    peers = peers_of([record.case for record in group.cases])
    head = ["case", "onelaunch", "n", "spread", *(f"against {peer}" for peer in peers), "% of the bound"]
    head += ["peak memory", "energy", "recorded"]
    rows = []
    for record in group.cases:
        case, ours = record.case, record.case["times"][OURS]
        cells = [record.title, time_of(record), str(ours["n"]), format_percent(ours["spread"])]
        cells += [against(case, peer) for peer in peers]
        cells += [format_percent(_floor_share(case), 0), format_bytes((case.get("peak_bytes") or {}).get(OURS))]
        cells += [format_joules(energy_of(case).get(OURS)), f"[{record.date[:10]}](../{RESULTS}/{record.file})"]
        rows.append(cells)
    return table(head, rows)


def _errors(cases: Sequence[dict[str, Any]]) -> list[str]:
    if not cases:
        return []
    said = [f"- {plain(sentence)}" for sentence in error_summary(cases)]
    return ["", "Errors on rows that were held out, means of the folds:", "", *table(*error_rows(cases)), "", *said]


def _floor_share(case: dict[str, Any]) -> float | None:
    """The share of the lower bound's speed. Older files hold only the time of the bound."""
    timed = (ratio_of(case, name) for name in case["times"] if name.startswith("floor"))
    return case.get("floor_share") or next(timed, None)


def _remarks(group: Group) -> list[str]:
    """One item per failed case, note, absent peer and doubt about a recording."""
    said = [
        f"- **{plain(record.title)} failed its check** ([{record.date[:10]}](../{RESULTS}/{record.file})), so it has no time: "
        f"{plain(record.case['check'].removeprefix('failed: '))}"
        for record in group.failed
    ]
    for record in group.cases:
        said += [
            f"- {plain(f'{record.title}: {name}: {words}')}" for name, words in (record.case.get("notes") or {}).items()
            if not record.case.get("errors")  # they are in the table of errors
        ]  # fmt: skip
    absent: dict[tuple[str, str], list[str]] = {}
    for record in group.cases:
        for peer, reason in (record.case.get("absent") or {}).items():
            absent.setdefault((peer, reason), []).append(record.title)
    for (peer, reason), titles in absent.items():
        where = "" if len(titles) == len(group.cases) else f" from {', '.join(titles)}"
        said.append(f"- {plain(f'Absent{where}: {peer} ({reason})')}")
    doubts = {record.file: record.doubts for record in (*group.cases, *group.failed)}
    said += [f"- **{plain(f'{file}: {words}')}**" for file, found in doubts.items() for words in found]
    return ["", *said] if said else []


def _over_size(sizes: Sizes) -> list[str]:
    content = sizes.content
    where = f"[{content['date'][:10]}](../{RESULTS}/{sizes.file})"
    lines = [f"{plain(content.get('network', ''))}: `{content['command']}`, {where}.", ""]
    for figure in size_figures(content["sizes"], sizes.file_stem, content["command"]):
        lines += [f"![{figure.title}](figures/{figure_name(sizes, figure.title)})", "", f"{figure.table.caption}:", ""]
        lines += [*table(figure.table.head, figure.table.rows), ""]
    lines += [f"- {plain(f'Absent: {words}')}" for words in absences(content)]
    return lines[:-1] if not lines[-1] else lines


def figure_name(sizes: Sizes, title: str) -> str:
    return f"{sizes.file_stem}-{title.lower().replace(' ', '-')}.svg"
