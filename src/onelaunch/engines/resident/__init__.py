"""The resident engine: a whole training run in one persistent kernel on a CUDA device.

Importing this package imports neither cuda.core nor a compiler; the first run does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from onelaunch.device import chip_of, cuda_unavailable_reason
from onelaunch.engines.contract import Run
from onelaunch.engines.members import MemberResult, MembersMonitor, MemberTask
from onelaunch.engines.stages import UnsupportedNetworkError, unsupported_names
from onelaunch.nvrtc import activations

if TYPE_CHECKING:
    from onelaunch.engines.resident.session import ResidentSession


MAX_PASSES = 2  # per step, for engine="auto": with more, an engine that goes through memory once is faster

ACTIVATIONS = activations.IMPLEMENTED
OPTIMIZERS = frozenset({"sgd", "adam", "adamw", "rmsprop", "lion"})  # the rules of cuda/weights.cuh


class ResidentEngine:
    name = "resident"

    def unavailable_reason(self, device: torch.device) -> str:
        if reason := cuda_unavailable_reason(device):
            return reason
        if torch.cuda.get_device_capability(device) < (8, 0):
            return "the GPU has compute capability below 8.0"
        from onelaunch.nvrtc.compile import unavailable_reason

        return unavailable_reason()

    def unsupported_reason(self, run: Run) -> str:
        if reason := self._option_reason(run):
            return reason
        from onelaunch.engines.resident.session import REGISTER_RESERVES, plan_for, settings_for
        from onelaunch.engines.resident.uint8_rows import with_uint8_rows

        try:
            settings = settings_for(with_uint8_rows(run), run.spec.compiled_precision)
            plan = plan_for(settings, chip_of(run.device), REGISTER_RESERVES[0])
        except UnsupportedNetworkError as reason:
            return str(reason)
        if run.spec.engine == "auto" and plan.micro_batches > MAX_PASSES:
            return f"a batch of {run.spec.batch_size} rows would take {plan.micro_batches} passes on the chip"
        return ""

    def _option_reason(self, run: Run) -> str:
        """What of the run's options or layers is not in this engine; empty if all are."""
        if run.network is None:
            return run.no_network_reason
        if run.uneven_updates:
            return run.uneven_updates
        if run.x.device != run.device:
            return "x is too large for the device's memory"
        if run.spec.clip_norm is not None:
            return "its update follows each gradient at once, and clip_norm must wait for all of them"
        if reason := unsupported_names(run.network, ACTIVATIONS, run.spec.optimizer, OPTIMIZERS):
            return reason
        if run.spec.rows >= 2**31:
            return f"x has {run.spec.rows} rows, this engine counts to 2**31 - 1"
        if run.spec.total_steps >= 2**32:
            return f"the run has {run.spec.total_steps} steps, this engine counts to 2**32 - 1"
        return ""

    def start(self, run: Run, state: Mapping[str, torch.Tensor]) -> ResidentSession:
        from onelaunch.engines.resident.session import ResidentSession

        return ResidentSession(run, state)

    def members_unsupported_reason(self, runs: Sequence[Run]) -> str:
        """Why the engine cannot train these runs together, though it may train each alone; empty when it can."""
        from onelaunch.engines.resident.members.train import members_unsupported_reason

        for run in runs:
            if reason := self._option_reason(run):
                return reason
        return members_unsupported_reason(runs)

    def members_plan(self, runs: Sequence[Run]) -> str:
        from onelaunch.engines.resident.members.train import members_plan

        return members_plan(runs)

    def train_members(self, tasks: Sequence[MemberTask], monitor: MembersMonitor) -> Iterator[MemberResult]:
        from onelaunch.engines.resident.members.train import train_members

        return train_members(tasks, monitor)


ENGINE = ResidentEngine()
