"""Whether fusing a chain pays: measured on a CUDA device, once for a chain and its sizes; predicted elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from onelaunch.activations import saves_input
from onelaunch.errors import OnelaunchError
from onelaunch.format import format_bytes
from onelaunch.format import format_seconds as duration
from onelaunch.fuse.costs import NOTHING, Step, Work, fused
from onelaunch.fuse.memory import memory
from onelaunch.fuse.placing import fusion_of, in_mode, make_plans
from onelaunch.fuse.put_back import attributes_put_back, these_put_back
from onelaunch.fuse.record import Found, Record, record
from onelaunch.fuse.region import chain_key
from onelaunch.fuse.roofline import DeviceModel, device_model
from onelaunch.fuse.timing import measure, waits_for_host
from onelaunch.fuse.verdict import forced
from onelaunch.measured_times import MeasuredTimes
from onelaunch.ops import linear_choice

# What is nearer than this is as fast: the spread of the training steps recorded on an H200 is 0.3 to 2.4 %.
NOISE = 0.02
TIMES = ("auto", "device", "program")  # what `fuse` and `explain` may count


@dataclass(frozen=True)
class Decision:
    """Seconds are those of one forward, and of one backward too in training mode."""

    fused: bool
    reason: str
    before: Work
    after: Work
    predicted: tuple[float, float]  # apart, fused
    measured: tuple[float, float] | None
    memory: tuple[float, float]  # bytes at the fullest moment


def decide(model: nn.Module, inputs: tuple[Any, ...], time: str, named_inputs: dict[str, Any]) -> None:
    """Writes the verdicts for a fused model at the sizes of these inputs, for both modes, and makes its plans anew."""
    fusion = fusion_of(model)
    assert fusion is not None
    current, device = model.training, device_of(model, (*inputs, *named_inputs.values()))
    for mode in (current, not current):
        with in_mode(model, mode):
            try:
                run = record(model, inputs, named_inputs)
            except OnelaunchError:
                if mode is current:
                    raise
                continue  # these inputs cannot be used in the other mode: one row has no batch statistics, say
            by_host = device.type == "cuda" and counts_host(time, model, run, inputs, named_inputs)
            for one in run.chains:
                decision = decision_on(one, run, device, by_host=by_host)
                if decision is not None:
                    verdict = None if decision.fused else decision.reason
                    fusion.verdicts[chain_key(one.chain, one.region.path, one.training)] = verdict
    make_plans(model, (False,) if fusion.options.eval_only else (True, False))


class _ByPosition(nn.Module):
    """A model whose last inputs go by name, called with all of them by position."""

    def __init__(self, model: nn.Module, names: Iterable[str]) -> None:
        super().__init__()
        self.model, self.names = model, tuple(names)
        self.training = model.training

    def forward(self, *inputs: Any) -> Any:
        first = len(inputs) - len(self.names)
        return self.model(*inputs[:first], **dict(zip(self.names, inputs[first:], strict=True)))


def counts_host(
    time: str, model: nn.Module, run: Record, inputs: tuple[Any, ...], named_inputs: dict[str, Any]
) -> bool:
    """Whether the time that counts is the one a program sees: `time` is one of TIMES, `run` a record of the call."""
    if time != "auto":
        return time == "program"
    # What will be written to is known: to watch for it would be timed too.
    with attributes_put_back(model), these_put_back(run.written):
        return waits_for_host(_ByPosition(model, named_inputs), (*inputs, *named_inputs.values()))


def decision_on(
    one: Found, run: Record, device: torch.device, roof: DeviceModel | None = None, by_host: bool = False
) -> Decision | None:
    """The decision on a chain that can be fused, in the mode of the record.

    `roof`: predict for that device, whatever the machine has. `by_host`: what counts is the time the host takes to launch.
    """
    steps = [run.steps[position] for position in one.steps]
    if one.chain.reason is not None or len(steps) != len(one.chain.nodes):
        return None
    measured = measure(one, steps, device, by_host) if device.type == "cuda" and roof is None else None
    extra_pass = measured is not None and takes_extra_pass(steps, linear_choice.times_on_device(device.index or 0))
    return judge(steps, roof or device_model(device), measured, by_host, extra_pass)


def judge(
    steps: list[Step],
    roof: DeviceModel,
    measured: tuple[float, float] | None = None,
    by_host: bool = False,
    extra_pass: bool = False,
) -> Decision:
    """Fuses what is faster fused, and what is as fast, within the noise of a measurement, and takes less memory."""
    before = Work(sum((step.forward for step in steps), NOTHING), sum((step.backward for step in steps), NOTHING))
    after = fused(steps, extra_pass)
    predicted = sum(seconds_apart(roof, step) for step in steps), seconds_of(roof, after, steps[0].output.dtype)
    lying = memory(steps)
    how = "predicted" if measured is None else "measured, launching included" if by_host else "measured"
    pays, reason = _verdict(measured or predicted, lying, how)
    overruled = forced()
    return Decision(pays if overruled is None else overruled, reason, before, after, predicted, measured, lying)


def _verdict(seconds: tuple[float, float], lying: tuple[float, float], how: str) -> tuple[bool, str]:
    """Whether to fuse, and why, from seconds and bytes in memory, apart and fused each."""
    apart_seconds, fused_seconds = seconds
    freed = lying[0] - lying[1]
    as_fast = fused_seconds <= (1 + NOISE) * apart_seconds
    if fused_seconds < (1 - NOISE) * apart_seconds or (fused_seconds < apart_seconds and freed <= 0):
        saved = 1 - fused_seconds / apart_seconds
        faster = f"saves {saved:.{0 if saved > 0.1 else 1}%} of its time"
        return True, f"{faster}{f' and {format_bytes(freed)} of memory' if freed > 0 else ''} ({how})"
    if as_fast and freed > 0:
        return True, f"as fast within {NOISE:.0%}, and saves {format_bytes(freed)} of memory ({how})"
    times = f"{duration(fused_seconds)} fused, {duration(apart_seconds)} apart ({how})"
    return False, f"does not pay: {times}{', and no memory saved' if as_fast else ''}"


def seconds_apart(roof: DeviceModel, step: Step) -> float:
    return seconds_of(roof, Work(step.forward, step.backward), step.output.dtype)


def seconds_of(roof: DeviceModel, work: Work, dtype: torch.dtype) -> float:
    """Forward and backward are bound apart: a product's time must not hide behind a pass over memory."""
    return roof.seconds(work.forward, dtype) + roof.seconds(work.backward, dtype)


def device_of(model: nn.Module, inputs: tuple[Any, ...]) -> torch.device:
    for tensor in (*(x for x in inputs if isinstance(x, torch.Tensor)), *model.parameters()):
        return tensor.device
    return torch.device("cpu")


def takes_extra_pass(steps: list[Step], times: MeasuredTimes) -> bool:
    """Whether `ops.linear` runs as cuBLAS and a pass for this chain, by the times it keeps."""
    if steps[0].role != "linear":
        return False
    roles = {step.role: step for step in steps}
    x, (n, k), last = steps[0].inputs[0], steps[0].inputs[1].shape, steps[-1].output
    activation = roles["activation"].name if "activation" in roles else None
    fastest = linear_choice.known_fastest(
        times, steps[0].output.dtype, max(1, x.numel // k), n, k, activation=activation,
        dropout="dropout" in roles and bool(roles["dropout"].options.get("dropped")),
        saves_z=last.requires_grad and saves_input(activation),
        bias=len(steps[0].inputs) > 2 or "batch_norm" in roles,  # folded weights have one
    )  # fmt: skip
    return fastest == linear_choice.LIBRARY.name
