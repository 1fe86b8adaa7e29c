"""The recorded results of a folder, as the README and `docs/results.md` show them: the newest figure of each case and chip."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onelaunch.errors import OnelaunchError
from onelaunch.report.benchmark import TITLES, has_times, peers_of, ratio_of, undecided
from onelaunch.report.comparison import speed_up
from onelaunch.report.machine import busy, chip
from onelaunch.report.read import read_json, unfinished

ON_GPU = ("ops", "memory", "fuse")  # also what times the host: it launches work for the GPU
LARGE = "large/"  # of `bench train --large`: after the others
GROUPS = ("train", "cpu", "ops", "fuse", "memory")  # the order of the README


@dataclass(frozen=True)
class Recorded:
    """A case that passed its check or failed it, with where it came from."""

    case: dict[str, Any]
    chip: str
    file: str
    date: str
    command: str
    doubts: Sequence[str] = ()  # about the whole recording

    @property
    def passed(self) -> bool:
        return bool(self.case["check"] == "passed")

    @property
    def title(self) -> str:
        return str(self.case["name"]).removeprefix(f"{self.case['group']}/")

    def best_peer(self) -> tuple[str, float] | None:
        """The fastest peer and its time over ours."""
        peers = {name: ratio_of(self.case, name) for name in peers_of([self.case])}
        return min(peers.items(), key=lambda entry: entry[1]) if peers else None

    def behind(self) -> list[tuple[str, float, bool]]:
        """Peers whose median was lower, their time over ours, and whether by more than the spread of the two."""
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
        return TITLES.get(self.name, self.name)

    @property
    def file_stem(self) -> str:
        return stem_of(f"{self.name}-{self.chip}")

    @property
    def beside_the_gpu(self) -> bool:
        """What `bench train` also times on the processor of a GPU's machine."""
        return self.name == "train" and bool(self.cases) and not any(record.case.get("gpu") for record in self.cases)


@dataclass(frozen=True)
class Sizes:
    """The time of a step over the hidden size, from `onelaunch compare --sizes`."""

    content: dict[str, Any]
    chip: str
    file: str

    @property
    def file_stem(self) -> str:
        return stem_of(f"sizes-{self.chip}")

    def lost_to(self) -> list[tuple[str, int, float]]:
        """Peer, hidden size and its time over ours, where its slowest sample was faster than our fastest."""
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
    sizes: Sequence[Sizes]  # one a chip
    cold_launch: dict[str, Any] | None  # of `benchmarks/cold_launch.py`


def stem_of(words: str) -> str:
    letters = "".join(letter if letter.isalnum() else "-" for letter in words.replace("(R)", ""))
    return "-".join(word for word in letters.lower().split("-") if word)


def read_recorded(folder: Path) -> Recordings:
    """A file of another shape (a breakdown, a log of trials) is left alone. A case that was skipped says nothing; one that
    failed says that older figures of it hold no more."""
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
            # A failed case has no clocks: it stands beside those of its name on the GPU, if it has ever run there.
            gpu = (
                bool(case.get("gpu"))
                or case["group"] in ON_GPU
                or (case["check"] != "passed" and case["group"] != "cpu")
            )
            command = content.get("command") or f"onelaunch bench {case['group']}"
            found.append(Recorded(case, chip(content["machine"], gpu=gpu), file, content["date"], command, doubts))
    return found


def _grouped(records: Sequence[Recorded]) -> list[Group]:
    found: dict[tuple[str, str], list[Recorded]] = {}
    for record in sorted(records, key=lambda record: record.title.startswith(LARGE)):
        found.setdefault((record.case["group"], record.chip), []).append(record)
    order = sorted(found, key=lambda key: (GROUPS.index(key[0]) if key[0] in GROUPS else len(GROUPS), key[1]))
    return [
        Group(*key, [r for r in found[key] if r.passed], [r for r in found[key] if not r.passed]) for key in order
    ]  # fmt: skip
