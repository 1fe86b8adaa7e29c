"""What the tests of the plans share: stages without a model, and a brute-force checker of layouts."""

from __future__ import annotations

from itertools import combinations, pairwise

from onelaunch.engines.graph.plan.memory import ALIGNMENT, Layout
from onelaunch.engines.graph.plan.stages import Stage
from onelaunch.run.network import Linear


def stages(widths: list[int], activation: str = "relu", p: float = 0.0) -> list[Stage]:
    made = [Stage(Linear(str(n), *pair, True), activation, p) for n, pair in enumerate(pairwise(widths))]
    made[-1] = Stage(made[-1].linear)
    return made


def check(layout: Layout) -> None:
    """Moment by moment: all buffers are aligned and inside the arena, and those alive together share no byte."""
    for buffer in layout.buffers:
        offset = layout.offsets[buffer.name]
        assert offset % ALIGNMENT == 0
        assert 0 <= offset <= layout.nbytes - buffer.nbytes
    for moment in range(max((b.last for b in layout.buffers), default=-1) + 1):
        alive = [b for b in layout.buffers if b.first <= moment <= b.last and b.nbytes]
        for one, other in combinations(alive, 2):
            begin, other_begin = layout.offsets[one.name], layout.offsets[other.name]
            assert begin + one.nbytes <= other_begin or other_begin + other.nbytes <= begin, (one, other, moment)
