"""Gradients that reach a value through residual additions: where they are stored, and which addition writes them first."""

from __future__ import annotations

from collections.abc import Sequence

from onelaunch.engines.cpu.plan.stages import Add, Stage


def skip_buffer(stages: Sequence[Stage], stage: Stage, number: int) -> str:
    """The buffer of the gradient that reaches the output of a stage's tapped group through additions, in panels.

    Where a single addition directly follows the product of its stage, that stage's own gradient stays as it is.
    """
    adding = _additions(stages, Add(stage.index, number))
    if len(adding) == 1 and adding[0][1] == 1 and adding[0][0] > stage.index:
        first = stages[adding[0][0]].groups[0]
        if not first.operations and not first.tapped:
            return f"gradient.panels.{adding[0][0]}"
    return f"skip.{stage.index}.{number}"


def own_skip_buffer(stages: Sequence[Stage], stage: Stage, number: int) -> str:
    """The same, if it is a buffer of its own that the backward pass uses; else empty."""
    buffer = skip_buffer(stages, stage, number)
    return buffer if buffer.startswith("skip") and stage.needs_gradient(number) else ""


def sends_gradient(stages: Sequence[Stage], stage: Stage, number: int) -> bool:
    """Whether the backward pass copies the gradient of this group's addition to its source."""
    head = stage.groups[number].head
    return isinstance(head, Add) and bool(own_skip_buffer(stages, stages[head.stage], head.group))


def adds_first(stages: Sequence[Stage], stage: Stage, number: int) -> bool:
    """Whether the addition at the head of this group is the first that the backward pass meets of those of its source."""
    head = stage.groups[number].head
    assert isinstance(head, Add)
    return _additions(stages, head)[-1] == (stage.index, number)


def _additions(stages: Sequence[Stage], source: Add) -> list[tuple[int, int]]:
    """(stage, group) of every addition of a group's output, in the order of the forward pass."""
    return [
        (stage.index, number) for stage in stages for number, group in enumerate(stage.groups) if group.head == source
    ]
