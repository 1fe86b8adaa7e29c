"""Writes the results into the README, `docs/results.md`, `docs/measuring.md` and `docs/figures/`: from `benchmarks/results/`
and nothing else.

`make readme` runs it; a test fails when what is committed differs from what it would write.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from onelaunch.errors import OnelaunchError
from onelaunch.files import write_atomic
from onelaunch.format import format_ratio, format_seconds
from onelaunch.report.benchmark import against, peers_of
from onelaunch.report.comparison import size_figures
from onelaunch.report.draw import Bar, bar_chart
from onelaunch.report.machine import chip
from onelaunch.report.recorded import Group, Recorded, Recordings, Sizes, read_recorded
from onelaunch.report.results_page import FIGURES, RESULTS, figure_name, plain, results_page, table, time_of
from onelaunch.report.standalone import standalone

BEGIN, END = "<!-- results: made by `make readme` -->", "<!-- end of results -->"
COLD_BEGIN, COLD_END = "<!-- cold launch: made by `make readme` -->", "<!-- end of cold launch -->"
ALL, MEASURING = "docs/results.md", "docs/measuring.md"
# Of the many cases of a group the README shows these; docs/results.md shows all.
HEADLINES = {
    "ops": ("relu_dropout-", "batch_norm-", "cross_entropy-", "linear-relu-8192", "linear-gelu_tanh-4096", "-training"),
}
FEW = 17


def generate(root: Path) -> dict[Path, str]:
    """Every generated file under `root` with its content."""
    recordings = read_recorded(root / RESULTS)
    readme, measuring = root / "README.md", root / MEASURING
    shown = [group for group in recordings.groups if not group.beside_the_gpu]
    files = {root / FIGURES / f"{group.file_stem}.svg": _figure(group) for group in shown if group.cases}
    for sizes in recordings.sizes:
        for figure in size_figures(sizes.content["sizes"], sizes.file_stem, sizes.content["command"]):
            files[root / FIGURES / figure_name(sizes, figure.title)] = standalone(figure.svg)
    parts = [*map(_short, shown), *map(_over_size, recordings.sizes), _honesty(recordings), ""]
    files[readme] = between(readme, BEGIN, END, "\n".join(parts))
    files[root / ALL] = results_page(recordings)
    if measuring.is_file():
        files[measuring] = between(measuring, COLD_BEGIN, COLD_END, _cold(recordings.cold_launch))
    return files


def between(path: Path, begin: str, end: str, words: str) -> str:
    """The text of a file with `words` between two marks."""
    text = path.read_text(encoding="utf-8")
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise OnelaunchError(f"{str(path)!r} must hold the lines {begin!r} and {end!r} once each, around the results")
    before, rest = text.split(begin)
    return f"{before}{begin}\n{words}{end}{rest.split(end)[1]}"


def _honesty(recordings: Recordings) -> str:
    timed = [record for group in recordings.groups for record in group.cases if record.best_peer()]
    failed = sum(len(group.failed) for group in recordings.groups)
    behind = [[surely for _, _, surely in record.behind()] for record in timed]
    lost = sum(any(sure) for sure in behind)
    perhaps = sum(bool(sure) and not any(sure) for sure in behind)
    more = f", in {perhaps} more perhaps (by less than the spread)" if perhaps else ""
    also = f" Failed their check, and so have no time: {failed}." if failed else ""
    where = f"[{ALL}]({ALL}) has them all, these first, with who was absent and why."
    return f"In {lost} of {len(timed)} recorded cases that have a peer, the peer is faster{more}: {where}{also}"


def _headlines(group: Group) -> list[Recorded]:
    wanted = HEADLINES.get(group.name, ("",))
    chosen = [record for record in group.cases if any(word in record.case["name"] for word in wanted)]
    return (chosen or list(group.cases))[:FEW]


def _short(group: Group) -> str:
    chosen = _headlines(group)
    peers = peers_of([record.case for record in chosen])
    sources = [*chosen, *group.failed]
    commands = " · ".join(f"`{plain(command)}`" for command in dict.fromkeys(record.command for record in sources))
    names = ", ".join(f"[{f}]({RESULTS}/{f})" for f in dict.fromkeys(record.file for record in sources))
    dates = ", ".join(dict.fromkeys(record.date[:10] for record in sources))
    rows = [[record.title, time_of(record), *(against(record.case, peer) for peer in peers)] for record in chosen]
    close = "; ≈: too noisy to tell" if any("≈" in cell for row in rows for cell in row) else ""
    few = f" {len(chosen)} of {len(group.cases)} cases." if len(chosen) < len(group.cases) else ""
    meaning = f"Medians; × is a peer's time over ours{close}.{few}"
    lines = [f"**{plain(group.title)}** on {plain(group.chip)}: {commands}, {dates}, {names}. {meaning}", ""]
    if chosen:
        head = ["case", "onelaunch", *(f"against {peer}" for peer in peers)]
        lines += table(head, rows)
        lines += ["", f"![{group.title}: the fastest peer's time over ours]({FIGURES}/{group.file_stem}.svg)", ""]
    for record in group.failed:
        lines += [f"{plain(record.title)} failed its check and has no time.", ""]
    return "\n".join(lines)


def _over_size(sizes: Sizes) -> str:
    content = sizes.content
    figure = size_figures(content["sizes"], sizes.file_stem, content["command"])[0]
    where = f"[{sizes.file}]({RESULTS}/{sizes.file})"
    head = f"**{figure.title}** on {plain(sizes.chip)}: `{plain(content['command'])}`, {content['date'][:10]}, {where}."
    return f"{head}\n\n![{figure.title}]({FIGURES}/{figure_name(sizes, figure.title)})\n"


def _figure(group: Group) -> str:
    bars = []
    for record in _headlines(group):
        best = record.best_peer()
        if best:
            name, ratio = best
            shown = against(record.case, name)
            wins = ratio >= 1 and "≈" not in shown
            bars.append(Bar(record.title, ratio, f"{shown} {name}", kind="ours" if wins else "bar"))
    title = f"{group.title} on {group.chip}: the fastest peer's time over ours"
    heading = "The fastest peer's time over ours. The line is 1×: beyond it, ours wins."
    if any("≈" in bar.shown for bar in bars):
        heading += " ≈: too noisy to tell."
    drawn = bar_chart(
        group.file_stem, title, bars, what="Time of the fastest peer over ours", heading=heading, mark=1.0
    )
    return standalone(drawn)


def _cold(recorded: dict[str, Any] | None) -> str:
    if recorded is None:
        return "Its output is not recorded yet: expect a large ratio first, and one near 1.7 second.\n"
    where = f"[{recorded['file']}](../{RESULTS}/{recorded['file']})"
    rows = []
    for words, one in recorded["cold_launch"].items():
        two, fused = one["two_kernels"], one["one_kernel"]
        rows.append([words, format_seconds(two), format_seconds(fused), format_ratio(two / fused)])
    first = f"{chip(recorded['machine'])}, {recorded['date'][:10]}, {where}"
    return "\n".join(table([first, "two kernels", "one kernel", "ratio"], rows)) + "\n"


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
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        said = f"a file in {RESULTS} is not as onelaunch writes it ({type(error).__name__}: {error})"
        sys.exit(f"error: {said}; `onelaunch report {RESULTS}` names it")
