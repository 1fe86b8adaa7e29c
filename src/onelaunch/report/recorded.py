"""Reads `benchmarks/results/`: the newest recording of each case on each chip, for the README and `docs/results.md`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onelaunch.bench.case import GROUPS, OURS, group_of
from onelaunch.errors import OnelaunchError
from onelaunch.report.benchmark import has_times, peers_of, ratio_of, undecided
from onelaunch.report.comparison import speed_up
from onelaunch.report.machine import busy, chip
from onelaunch.report.read import read_json, unfinished

LARGE = "large/"  # the cases of `bench train --large`, listed after the others


@dataclass(frozen=True)
class Recorded:
    """A case that passed or failed its check, and the file that it was recorded in."""

    case: dict[str, Any]
    chip: str
    file: str
    date: str
    command: str
    doubts: Sequence[str] = ()  # reasons to distrust the whole file

    @property
    def passed(self) -> bool:
        return bool(self.case["check"] == "passed")

    @property
    def title(self) -> str:
        return str(self.case["name"]).removeprefix(f"{self.case['group']}/")

    def best_peer(self) -> tuple[str, float] | None:
        """The fastest peer that is not a way of ours, and its time divided by ours; None without peers."""
        peers = {name: ratio_of(self.case, name) for name in peers_of([self.case]) if not name.startswith(OURS)}
        return min(peers.items(), key=lambda entry: entry[1]) if peers else None

    def behind(self) -> list[tuple[str, float, bool]]:
        """Peers with a lower median: name, time divided by ours, and whether they differ by more than the spread of the two."""
        close, ratios = undecided(self.case), {peer: ratio_of(self.case, peer) for peer in peers_of([self.case])}
        return [(peer, ratio, peer not in close) for peer, ratio in ratios.items() if ratio < 1]


@dataclass(frozen=True)
class Group:
    """The recorded cases of one group on one chip."""

    name: str
    chip: str
    cases: Sequence[Recorded]  # with times
    failed: Sequence[Recorded]

    @property
    def title(self) -> str:
        return group_of(self.name).title

    @property
    def file_stem(self) -> str:
        return stem_of(f"{self.name}-{self.chip}")

    @property
    def is_drawn(self) -> bool:
        """Whether it has a figure. The case that `bench train` times on the CPU of a GPU machine has none."""
        return bool(self.cases) and (self.name != "train" or any(record.case.get("gpu") for record in self.cases))


@dataclass(frozen=True)
class Sizes:
    """The time per step over the hidden size, from `onelaunch compare --sizes`."""

    content: dict[str, Any]
    chip: str
    file: str

    @property
    def file_stem(self) -> str:
        return stem_of(f"sizes-{self.chip}")

    def lost_to(self) -> list[tuple[str, int, float]]:
        """Peer, hidden size and time divided by ours, where the peer's slowest sample is faster than our fastest."""
        sizes = self.content["sizes"]
        found = []
        for peer, ratios in speed_up(sizes).items():
            for hidden, ratio in ratios.items():
                ours = sizes["step_seconds"][sizes["auto"][str(hidden)]][str(hidden)]
                if sizes["step_seconds"][peer][str(hidden)]["maximum"] < ours["minimum"]:
                    found.append((peer, hidden, ratio))
        return found


@dataclass(frozen=True)
class Recordings:
    groups: Sequence[Group]
    sizes: Sequence[Sizes]  # one per chip
    cold_launch: dict[str, Any] | None  # the output of `benchmarks/cold_launch.py`


def stem_of(words: str) -> str:
    letters = "".join(letter if letter.isalnum() else "-" for letter in words.replace("(R)", ""))
    return "-".join(word for word in letters.lower().split("-") if word)


def read_recorded(folder: Path) -> Recordings:
    """The recordings in `folder`. Files of another kind (a breakdown, a log of trials) are ignored, and so are skipped
    cases. A failed case replaces older recordings of it. Raises OnelaunchError for a file that is not as we write it."""
    newest: dict[tuple[str, str], Recorded] = {}
    sizes: dict[str, Sizes] = {}
    cold: dict[str, Any] | None = None
    for path in sorted(folder.glob("*.json")):
        content = read_json(path)
        if not isinstance(content, dict) or "machine" not in content:
            continue
        try:
            date = content["date"]
            if "cold_launch" in content and (cold is None or cold["date"] <= date):
                cold = {**content, "file": path.name}
            if (content.get("sizes") or {}).get("step_seconds"):
                where = chip(content["machine"])
                if where not in sizes or sizes[where].content["date"] <= date:
                    sizes[where] = Sizes(content, where, path.name)
            for record in _cases(content, path.name):
                key = (record.case["name"], record.chip)
                if key not in newest or newest[key].date <= record.date:
                    newest[key] = record
        except (LookupError, TypeError, AttributeError) as error:
            raise OnelaunchError(
                f"{str(path)!r} is not as onelaunch writes it ({type(error).__name__}: {error}): take it again"
            ) from error
    return Recordings(_grouped(list(newest.values())), [sizes[where] for where in sorted(sizes)], cold)


def _cases(content: dict[str, Any], file: str) -> list[Recorded]:
    found = []
    doubts = [words for _, words in busy(content) + unfinished(content)]
    for case in content.get("cases", []):
        if case["check"].startswith("failed") or (case["check"] == "passed" and has_times(case)):
            # A failed case records no GPU clocks: only the group tells where it ran.
            on_gpu = group_of(case["group"]).on_gpu
            gpu = bool(case.get("gpu") or on_gpu or (on_gpu is None and case["check"] != "passed"))
            command = content.get("command") or f"onelaunch bench {case['group']}"
            found.append(Recorded(case, chip(content["machine"], gpu=gpu), file, content["date"], command, doubts))
    return found


def _grouped(records: Sequence[Recorded]) -> list[Group]:
    found: dict[tuple[str, str], list[Recorded]] = {}
    for record in sorted(records, key=lambda record: record.title.startswith(LARGE)):
        found.setdefault((record.case["group"], record.chip), []).append(record)
    names = list(dict.fromkeys([*GROUPS, *(name for name, _ in found)]))
    order = sorted(found, key=lambda key: (names.index(key[0]), key[1]))
    return [Group(*k, [r for r in found[k] if r.passed], [r for r in found[k] if not r.passed]) for k in order]
