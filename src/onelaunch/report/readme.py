"""Writes the results into the README, `docs/results.md` and `docs/figures/`, from `benchmarks/results/` alone.

`make readme` runs it; a test fails when what is committed differs from what it would write.
"""

from __future__ import annotations

import sys
from pathlib import Path

from onelaunch.errors import OnelaunchError
from onelaunch.files import write_atomic
from onelaunch.report.benchmark import OURS, energy_of, peers_of
from onelaunch.report.comparison import size_figures
from onelaunch.report.draw import Bar, bar_chart
from onelaunch.report.machine import chip
from onelaunch.report.number import byte_size, joules, percent, seconds, times
from onelaunch.report.recorded import Group, Recorded, read_recorded
from onelaunch.report.standalone import standalone

BEGIN, END = "<!-- results: made by `make readme` -->", "<!-- end of results -->"
RESULTS, FIGURES, ALL = "benchmarks/results", "docs/figures", "docs/results.md"
# Of the many cases of a group the README shows these; docs/results.md shows all.
HEADLINES = {
    "ops": ("relu_dropout-", "batch_norm-", "cross_entropy-", "linear-relu-8192", "linear-gelu_tanh-4096", "-training"),
}
FEW = 16


def generate(root: Path) -> dict[Path, str]:
    """Every generated file under `root` with its content."""
    groups, comparisons = read_recorded(root / RESULTS)
    readme = root / "README.md"
    text = readme.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise OnelaunchError(f"{str(readme)!r} must hold the lines {BEGIN!r} and {END!r} once each, around the results")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    files = {root / FIGURES / f"{group.file_stem}.svg": _figure(group) for group in groups}
    pictures = []
    for comparison in comparisons:
        stem, sizes = Path(comparison["file"]).stem, comparison.get("sizes") or {}
        for figure in size_figures(sizes, stem, comparison["command"]) if sizes.get("step_seconds") else []:
            name = f"{stem}-{figure.title.lower().replace(' ', '-')}.svg"
            files[root / FIGURES / name] = standalone(figure.svg)
            pictures.append(f"![{figure.title}, {chip(comparison['machine'])}]({FIGURES}/{name})")
    shown = [_short(group) for group in groups]
    recorded = [record for group in groups for record in group.cases]
    lost = sum(bool(record.lost_to()) for record in recorded)
    honesty = f"In {lost} of {len(recorded)} recorded cases a peer is faster: [{ALL}]({ALL}) has them all, these first."
    summary = "\n".join([*shown, *pictures, "", honesty, ""])
    files[readme] = f"{before}{BEGIN}\n{summary}{END}{after}"
    files[root / ALL] = _everything(groups)
    return files


def _headlines(group: Group) -> list[Recorded]:
    wanted = HEADLINES.get(group.name, ("",))
    chosen = [record for record in group.cases if any(word in record.case["name"] for word in wanted)]
    return (chosen or list(group.cases))[:FEW]


def _short(group: Group) -> str:
    chosen = _headlines(group)
    peers = peers_of([record.case for record in chosen])
    commands = " · ".join(f"`{command}`" for command in dict.fromkeys(record.command for record in chosen))
    files = ", ".join(f"[{f}]({RESULTS}/{f})" for f in dict.fromkeys(record.file for record in chosen))
    dates = ", ".join(dict.fromkeys(record.date[:10] for record in chosen))
    lines = [
        f"**{group.title}** on {group.chip}: {commands}, {dates}, {files}. Medians; × is a peer's time over ours.",
        "",
        f"| case | onelaunch | {' | '.join(f'against {peer}' for peer in peers)} |",
        f"|---|---|{'---|' * len(peers)}",
    ]
    for record in chosen:
        ratios = " | ".join(times(record.case["ratio"].get(peer)) for peer in peers)
        lines.append(f"| {record.title} | {_time(record)} | {ratios} |")
    lines += ["", f"![{group.title}: the fastest peer's time over ours]({FIGURES}/{group.file_stem}.svg)", ""]
    return "\n".join(lines)


def _time(record: Recorded) -> str:
    return f"{seconds(record.case['times'][OURS]['median'])} a {record.case['unit']}"


def _figure(group: Group) -> str:
    bars = []
    for record in _headlines(group):
        best = record.best_peer()
        if best:
            name, ratio = best
            shown = f"{times(ratio)} {name}"
            bars.append(Bar(record.title, ratio, shown, kind="ours" if ratio >= 1 else "bar"))
    title = f"{group.title} on {group.chip}: the fastest peer's time over ours"
    heading = "The fastest peer's time over ours. The line is 1×: beyond it, ours wins."
    drawn = bar_chart(
        group.file_stem, title, bars, what="Time of the fastest peer over ours", heading=heading, mark=1.0
    )
    return standalone(drawn)


def _everything(groups: list[Group]) -> str:
    lines = [
        "# Results",
        "",
        "Made by `make readme` from `benchmarks/results/`: the newest recording of each case on each chip.",
        "How the figures are taken: [measuring.md](measuring.md).",
    ]
    lost = [
        (group, record, peer, ratio) for group in groups for record in group.cases for peer, ratio in record.lost_to()
    ]
    lines += ["", "## Where a peer is faster", ""]
    if lost:
        lines += [
            "By more than the spread of the two.",
            "| case | chip | peer | onelaunch takes |",
            "|---|---|---|---|",
        ]
        lines += [
            f"| {r.case['name']} | {g.chip} | {peer} | {times(1 / ratio)} its time |" for g, r, peer, ratio in lost
        ]
    else:
        lines.append("In no recorded case by more than the spread of the two.")
    for group in groups:
        lines += ["", f"## {group.title}: {group.chip}", "", *_full_table(group)]
    return "\n".join(lines) + "\n"


def _full_table(group: Group) -> list[str]:
    peers = peers_of([record.case for record in group.cases])
    head = ["case", "onelaunch", "n", "spread", *(f"against {peer}" for peer in peers), "share of the floor's speed"]
    head += ["peak memory", "energy", "recorded"]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for record in group.cases:
        case, ours = record.case, record.case["times"][OURS]
        cells = [record.title, _time(record), str(ours["n"]), percent(ours["spread"])]
        cells += [times(case["ratio"].get(peer)) for peer in peers]
        cells += [percent(_floor_share(case), 0), byte_size((case.get("peak_bytes") or {}).get(OURS))]
        cells += [joules(energy_of(case).get(OURS)), f"[{record.date[:10]}](../{RESULTS}/{record.file})"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _floor_share(case: dict[str, object]) -> float | None:
    """Also of older files, which timed the floor but did not set us against it."""
    share, ratios = case.get("floor_share"), case["ratio"]
    if share is None and isinstance(ratios, dict):
        return next((ratio for name, ratio in ratios.items() if name.startswith("floor")), None)
    return share if isinstance(share, float) else None


def stale(root: Path) -> list[str]:
    """Generated files that differ from what is there, and figures nobody makes any more."""
    files = generate(root)
    differ = [
        path for path, content in files.items() if not path.is_file() or path.read_text(encoding="utf-8") != content
    ]
    left_over = [path for path in (root / FIGURES).glob("*.svg") if path not in files]
    return sorted(str(path.relative_to(root)) for path in [*differ, *left_over])


def main(root: Path = Path()) -> None:
    files, changed = generate(root), stale(root)
    for name in changed:
        path = root / name
        if path in files:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, files[path])
        else:
            path.unlink()
    print("\n".join(changed) or "nothing changed")


if __name__ == "__main__":
    try:
        main()
    except OnelaunchError as error:
        sys.exit(f"error: {error}")
