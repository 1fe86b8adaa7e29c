"""The CPU engine: LLVM compiles native code for the network, and steps run without the Python interpreter between them.

Importing this package imports neither llvmlite nor the emitters; the first run does.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from onelaunch.engines.contract import Run
from onelaunch.engines.members import MemberResult, MembersMonitor, MemberTask
from onelaunch.engines.stages import UnsupportedNetworkError, unsupported_names

if TYPE_CHECKING:
    from onelaunch.engines.cpu.session import CpuSession

# What code/elementwise.py and code/optimizer.py have; a test compares.
ACTIVATIONS = frozenset({
    "relu", "leaky_relu", "sigmoid", "tanh", "gelu", "gelu_tanh", "silu", "elu", "selu", "mish", "softplus", "hardswish",
})  # fmt: skip
OPTIMIZERS = frozenset({"sgd", "adam", "adamw", "rmsprop", "lion"})


class CpuEngine:
    name = "cpu"

    def unavailable_reason(self, device: torch.device) -> str:
        if device.type != "cpu":
            return f"the model is on {device}, not on the CPU"
        if importlib.util.find_spec("llvmlite") is None:
            return "llvmlite is not installed: pip install llvmlite"
        if sys.byteorder != "little":
            return "this machine is big-endian"
        return ""

    def unsupported_reason(self, run: Run) -> str:
        if run.network is None:
            return run.no_network_reason
        if run.uneven_updates:
            return run.uneven_updates
        if reason := unsupported_names(run.network, ACTIVATIONS, run.spec.optimizer, OPTIMIZERS):
            return reason
        from onelaunch.engines.cpu.plan.stages import stages_of

        try:
            stages_of(run.network)
        except UnsupportedNetworkError as reason:
            return str(reason)
        if run.spec.precision not in ("auto", "fp32"):
            from onelaunch.engines.cpu.plan.target import host

            if run.spec.precision not in ("bf16", "tf32"):
                return f"precision={run.spec.precision!r} is not in this engine: pass 'fp32'"
            if not host().tiles:
                return f"precision={run.spec.precision!r} needs a CPU with AMX; this one computes in fp32"
        if len(run.x) >= 2**31:
            return f"x has {len(run.x)} rows, this engine counts to 2**31 - 1"
        return ""

    def start(self, run: Run, state: Mapping[str, torch.Tensor]) -> CpuSession:
        from onelaunch.engines.cpu.session import CpuSession

        return CpuSession(run, state)

    def members_unsupported_reason(self, runs: Sequence[Run]) -> str:
        return ""

    def members_plan(self, runs: Sequence[Run]) -> str:
        from onelaunch.engines.cpu.members import members_plan

        return members_plan(runs)

    def train_members(self, tasks: Sequence[MemberTask], monitor: MembersMonitor) -> Iterator[MemberResult]:
        from onelaunch.engines.cpu.members import train_members

        return train_members(tasks, monitor)


ENGINE = CpuEngine()
