"""What two sweeps must have in common for one to continue the other in its checkpoint folder.

`make_model` does not count, only the first model that it makes: a folder may continue with one that was mended for the
candidates that failed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onelaunch.engines.contract import Run
from onelaunch.sweep.member import Member
from onelaunch.sweep.runs import MemberRuns
from onelaunch.train.fingerprints import checksum, fingerprint, identity_text


def identity_of(
    members: Sequence[Member], options: Mapping[str, Any], strategy: str, metric: str, runs: MemberRuns, trial: Run
) -> dict[str, Any]:
    """By name of what may differ, as JSON values. `trial`: the Run of the first member that can be trained."""
    held = (*(trial.validation or ()), *trial.more_validation_x)
    data, given = runs.tensors, runs.splits.given()
    return {
        "grid": [f"{m.seed} {m.split} {identity_text(m.parameters)}" for m in members],
        "options": identity_text(options),
        "strategy": f"{strategy} {metric}"
        if strategy == "halving"
        else strategy,  # there the metric decides who goes on
        "folds": f"{[len(rows) for rows in given]} {checksum(given):08x}",
        "bootstrap": runs.splits.bootstrap,
        "validation": f"{checksum(held):08x}" if held else "",
        "model": str(trial.model),
        "weights": f"{checksum(trial.model.state_dict().values()):08x}",
        "data": f"{[list(each.shape) for each in data]} {checksum(data):08x}" if data else fingerprint(trial),
    }
