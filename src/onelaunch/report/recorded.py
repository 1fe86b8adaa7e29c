"""The recorded results of a folder, as the README and `docs/results.md` show them: the newest figure of each case and chip."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onelaunch.report.benchmark import FLOOR, OURS, TITLES, peers_of
from onelaunch.report.machine import chip
from onelaunch.report.read import read_json

ON_GPU = ("ops", "memory", "fuse")  # also what times the host: it launches work for the GPU
GROUPS = ("train", "cpu", "ops", "fuse", "memory")  # the order of the README


@dataclass(frozen=True)
class Recorded:
    """A passed case with where it came from."""

    case: dict[str, Any]
    chip: str
    file: str
    date: str
    command: str

    @property
    def title(self) -> str:
        return str(self.case["name"]).removeprefix(f"{self.case['group']}/")

    def best_peer(self) -> tuple[str, float] | None:
        """The fastest peer and its time over ours."""
        peers = {name: self.case["ratio"][name] for name in peers_of([self.case])}
        return min(peers.items(), key=lambda entry: entry[1]) if peers else None

    def lost_to(self) -> list[tuple[str, float]]:
        """Peers that were faster by more than the spread of the two."""
        spreads = {name: timing["spread"] for name, timing in self.case["times"].items()}
        return [
            (name, ratio)
            for name, ratio in self.case["ratio"].items()
            if not name.startswith(FLOOR) and ratio * (1 + spreads[name]) * (1 + spreads[OURS]) < 1
        ]


@dataclass(frozen=True)
class Group:
    """The recorded cases of one group on one chip."""

    name: str
    chip: str
    cases: Sequence[Recorded]

    @property
    def title(self) -> str:
        return TITLES.get(self.name, self.name)

    @property
    def file_stem(self) -> str:
        words = "".join(
            letter if letter.isalnum() else "-"
            for letter in f"{self.name}-{self.chip.split(',')[0]}".replace("(R)", "")
        )
        return "-".join(word for word in words.lower().split("-") if word)


def read_recorded(folder: Path) -> tuple[list[Group], list[dict[str, Any]]]:
    """Groups of bench cases, and the comparisons. A file of another shape (a breakdown, a log of trials) is left alone."""
    newest: dict[tuple[str, str], Recorded] = {}
    comparisons = []
    for path in sorted(folder.glob("*.json")):
        content = read_json(path)
        if isinstance(content, dict) and isinstance(content.get("contenders"), dict):
            comparisons.append({**content, "file": path.name})
        if not isinstance(content, dict) or not isinstance(content.get("cases"), list) or "machine" not in content:
            continue
        for case in content["cases"]:
            if case["check"] != "passed":
                continue
            where = chip(content["machine"], gpu=case.get("gpu") is not None or case["group"] in ON_GPU)
            command = content.get("command") or f"onelaunch bench {case['group']}"
            record = Recorded(case, where, path.name, content["date"], command)
            key = (case["name"], where)
            if key not in newest or newest[key].date <= record.date:
                newest[key] = record
    found: dict[tuple[str, str], list[Recorded]] = {}
    for record in newest.values():
        found.setdefault((record.case["group"], record.chip), []).append(record)
    order = sorted(found, key=lambda key: (GROUPS.index(key[0]) if key[0] in GROUPS else len(GROUPS), key[1]))
    return [Group(name, where, found[name, where]) for name, where in order], comparisons
