"""Writes the recorded results into README.md, `docs/results.md`, `docs/measuring.md` and `docs/figures/`.

`make readme` runs this file. Every figure comes from `benchmarks/results/`. A test fails when a committed file differs
from what this file would write.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from onelaunch.errors import OnelaunchError
from onelaunch.files import write_atomic
from onelaunch.format import NONE, format_ratio, format_seconds
from onelaunch.report.benchmark import against
from onelaunch.report.comparison import size_figures
from onelaunch.report.machine import chip
from onelaunch.report.recorded import Recorded, Recordings, read_recorded
from onelaunch.report.results_page import FIGURES, RESULTS, figure_name, group_figure, results_page, table, time_of
from onelaunch.report.standalone import standalone

BEGIN, END = "<!-- results: made by `make readme` -->", "<!-- end of results -->"
COLD_BEGIN, COLD_END = "<!-- cold launch: made by `make readme` -->", "<!-- end of cold launch -->"
ALL, MEASURING = "docs/results.md", "docs/measuring.md"
# The rows of the README's table: a case, and its name in words. The chip is added from the recording; a case that is not
# recorded has no row.
HEADLINES = {
    "train/pixels/784-128-128-128-10/32/sgd/bf16": "train MLP 784-128-128-128-10, batch 32, bf16",
    "cpu/784-128-128-128-10/32/sgd": "train MLP 784-128-128-128-10, batch 32, fp32",
    "sweep/784-128-128-128-10/32/sgd/64": "a step of one of 64 MLPs 784-128-128-128-10 trained at once, bf16",
    "sweep/digits": "grid search over MLPs 64-32-10 on digits, 5 folds",
    "models/gpt2": "`ol.train_step` of GPT-2 small, 8×1024 tokens, bf16, AdamW",
    "ops/relu_dropout-fp32-training": "ReLU + Dropout of 50·2²⁰ fp32 values, forward + backward",
}


def generate(root: Path) -> dict[Path, str]:
    """The content of every generated file, by its path under `root`."""
    recordings = read_recorded(root / RESULTS)
    readme, measuring = root / "README.md", root / MEASURING
    files = {
        root / FIGURES / f"{group.file_stem}.svg": group_figure(group) for group in recordings.groups if group.is_drawn
    }
    for sizes in recordings.sizes:
        for figure in size_figures(sizes.content["sizes"], sizes.file_stem, sizes.content["command"]):
            files[root / FIGURES / figure_name(sizes, figure.title)] = standalone(figure.svg)
    files[readme] = replace_between(
        readme, BEGIN, END, "\n".join([*_headline_table(recordings), _losses(recordings), ""])
    )
    files[root / ALL] = results_page(recordings)
    if measuring.is_file():
        files[measuring] = replace_between(measuring, COLD_BEGIN, COLD_END, _cold_launch(recordings.cold_launch))
    return files


def replace_between(path: Path, begin: str, end: str, words: str) -> str:
    """The text of a file with `words` between its two marker lines; raises OnelaunchError unless each is there once."""
    text = path.read_text(encoding="utf-8")
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise OnelaunchError(f"{str(path)!r} must hold the lines {begin!r} and {end!r} once each, around the results")
    before, rest = text.split(begin)
    return f"{before}{begin}\n{words}{end}{rest.split(end)[1]}"


def _headline_table(recordings: Recordings) -> list[str]:
    records = [record for group in recordings.groups for record in group.cases]
    rows = [_headline(words, r) for name, words in HEADLINES.items() for r in records if r.case["name"] == name]
    return [*table(["", "onelaunch", "best alternative", "factor"], rows), ""] if rows else []


def _headline(words: str, record: Recorded) -> list[str]:
    where = record.chip.replace("(R)", "").replace(" Processor", "").removeprefix("NVIDIA ")
    best = record.best_peer()
    if best is None:
        return [f"{words}, {where}", time_of(record), NONE, NONE]
    peer = best[0]
    its_time = f"{format_seconds(record.case['times'][peer]['median'])} ({peer})"
    return [f"{words}, {where}", time_of(record), its_time, against(record.case, peer)]


def _losses(recordings: Recordings) -> str:
    """In how many recorded cases a peer is faster, surely or within the spread, and how many cases failed."""
    timed = [record for group in recordings.groups for record in group.cases if record.best_peer()]
    failed = sum(len(group.failed) for group in recordings.groups)
    behind = [[surely for _, _, surely in record.behind()] for record in timed]
    lost = sum(any(sure) for sure in behind)
    within = sum(bool(sure) and not any(sure) for sure in behind)
    said = [f"In {lost} of {len(timed)} recorded cases [a peer is faster]({ALL}#where-a-peer-is-faster)."]
    said += [f"In {within} more a peer's median is lower, by less than the spread."] if within else []
    if failed:
        said.append(
            "1 failed its check and has no time." if failed == 1 else f"{failed} failed their check and have no time."
        )
    return "\n".join(said)


def _cold_launch(recorded: dict[str, Any] | None) -> str:
    if recorded is None:
        return "Its output is not recorded yet: expect a large first ratio and a second one near 1.7.\n"
    where = f"[{recorded['file']}](../{RESULTS}/{recorded['file']})"
    times = [(words, one["two_kernels"], one["one_kernel"]) for words, one in recorded["cold_launch"].items()]
    rows = [[words, format_seconds(two), format_seconds(one), format_ratio(two / one)] for words, two, one in times]
    first = f"{chip(recorded['machine'])}, {recorded['date'][:10]}, {where}"
    return "\n".join(table([first, "two kernels", "one kernel", "ratio"], rows)) + "\n"


def stale(root: Path) -> list[str]:
    """The generated files that differ from the committed ones, and figures that nothing generates any more."""
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


def command() -> None:
    """`main`, which ends with one line where a recording is not as onelaunch writes it."""
    try:
        main()
    except OnelaunchError as error:
        sys.exit(f"error: {error}")
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        said = f"a file in {RESULTS} is not as onelaunch writes it ({type(error).__name__}: {error})"
        sys.exit(f"error: {said}; `onelaunch report {RESULTS}` names it")


if __name__ == "__main__":
    command()
