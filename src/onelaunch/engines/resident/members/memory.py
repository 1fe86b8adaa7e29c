"""The device memory of many members: rows that they share, weights and state in flat arrays, the table of their parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from onelaunch.engines.contract import Run, State
from onelaunch.engines.members import MemberTask
from onelaunch.engines.resident.buffers import parameter_shapes, rows_as_fetched, targets_as_fetched
from onelaunch.engines.resident.members.group import same_tensor
from onelaunch.engines.resident.plan.plan import Plan
from onelaunch.engines.resident.plan.stages import dropouts_of, stages_of
from onelaunch.engines.resident.session import CLOCK_HZ, PARAMS, PATIENCE_SECONDS, RECORD, set_run
from onelaunch.engines.resident.uint8_rows import as_uint8
from onelaunch.optimizers import OPTIMIZERS
from onelaunch.rng import keep_scale, keep_threshold, permutation_bits

Key = tuple[object, ...]


def all_uint8(runs: Sequence[Run]) -> bool:
    """Whether the rows of every run are uint8, or floats that are whole multiples of 1/255."""
    tensors = {same_tensor(x): x for run in runs for x in _inputs(run)}
    return all(x.dtype == torch.uint8 or as_uint8(x) is not None for x in tensors.values())


def _inputs(run: Run) -> list[torch.Tensor]:
    return [run.x, run.validation[0]] if run.validation else [run.x]


class SharedRows:
    """Rows and targets as the kernel fetches them, once per tensor, however many members use it."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._made: dict[Key, tuple[torch.Tensor, torch.Tensor]] = {}  # with the source, which must not be freed

    def x(self, x: torch.Tensor) -> int:
        return self._once("x", x, self._rows)

    def y(self, y: torch.Tensor) -> int:
        return self._once("y", y, lambda y: targets_as_fetched(y, self.plan.settings.loss))

    def numbers(self, rows: torch.Tensor, device: torch.device) -> int:
        return self._once("numbers", rows, lambda rows: rows.to(device, torch.int32).contiguous())

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        settings = self.plan.settings
        if settings.uint8_rows:
            found = x if x.dtype == torch.uint8 else as_uint8(x)
            assert found is not None
            x = found
        elif x.dtype == torch.uint8:
            x = x.float() / 255
        return rows_as_fetched(x, self.plan, settings.precision)

    def _once(self, kind: str, tensor: torch.Tensor, make: Callable[[torch.Tensor], torch.Tensor]) -> int:
        key = (kind, *same_tensor(tensor))
        if key not in self._made:
            self._made[key] = tensor, make(tensor)
        return self._made[key][1].data_ptr()


class MembersMemory:
    """The memory of one launch: entry i belongs to `tasks[i]`."""

    def __init__(self, tasks: Sequence[MemberTask], plan: Plan, rows: SharedRows, places: int) -> None:
        self.tasks, self.plan, self.device = tasks, plan, tasks[0].run.device
        self._shapes = parameter_shapes(plan)
        self._sizes = [math.prod(shape) for _, shape in self._shapes]
        self._tensors = [dict(task.run.model.state_dict(keep_vars=True)) for task in tasks]
        settings = plan.settings
        self._kinds = OPTIMIZERS[settings.optimizer].state_names(float(settings.momentum))
        with torch.no_grad():
            self.weights = self._flat(self._tensors)
            self.states = [self._flat_state(kind) for kind in self._kinds]
        steps = [task.last_step - task.first_step for task in tasks]
        epochs = [count // task.run.spec.steps_per_epoch + 2 for count, task in zip(steps, tasks, strict=True)]
        self._first_loss, self._first_record = np.cumsum([0, *steps]), np.cumsum([0, *epochs])
        self._losses = torch.zeros(max(1, self._first_loss[-1]), device=self.device)
        words = RECORD.itemsize // 8
        self._records = torch.zeros(int(self._first_record[-1]) * words, dtype=torch.int64, device=self.device)
        self.scratch = torch.empty(
            max(16, plan.exchange.size * plan.blocks * places), dtype=torch.uint8, device=self.device
        )
        self.next = torch.zeros(1, dtype=torch.int32, device=self.device)
        self._rows = rows

    def _flat(self, tensors: Sequence[Mapping[str, Any]]) -> torch.Tensor:
        """`[members, parameters]`; zeros where a member has no such tensor."""
        parts = []
        for member in tensors:
            for name, shape in self._shapes:
                tensor = member.get(name)
                found = torch.zeros(shape) if tensor is None else tensor.detach()
                parts.append(found.to(self.device, torch.float32).reshape(-1))
        return torch.cat(parts).reshape(len(tensors), -1)

    def _flat_state(self, kind: str) -> torch.Tensor:
        if not any(task.state for task in self.tasks):
            return torch.zeros_like(self.weights)
        names = [name for name, _ in self._shapes]
        return self._flat([{name: task.state.get(f"{kind}.{name}") for name in names} for task in self.tasks])

    def table(self, control_address: int, control_bytes: int) -> torch.Tensor:
        """The parameters of all members, on the device."""
        params = np.zeros(len(self.tasks), PARAMS)
        losses, records = self._losses.data_ptr(), self._records.data_ptr()
        for number, task in enumerate(self.tasks):
            run, entry = task.run, params[number]
            set_run(entry, run)
            entry["x"], entry["y"] = self._rows.x(run.x), self._rows.y(run.y)
            if run.validation:
                entry["validation_x"], entry["validation_y"] = (
                    self._rows.x(run.validation[0]),
                    self._rows.y(run.validation[1]),
                )
            if run.train_rows is not None:
                entry["row_numbers"] = self._rows.numbers(run.train_rows, self.device)
            entry["weights"] = self.weights[number].data_ptr()
            for place, state in enumerate(self.states):
                entry[f"state{place}"] = state[number].data_ptr()
            entry["control"] = control_address + number * control_bytes
            entry["losses"] = losses + int(self._first_loss[number]) * 4
            entry["records"] = records + int(self._first_record[number]) * RECORD.itemsize
            entry["first_step"], entry["last_step"] = task.first_step, task.last_step
            entry["permutation_bits"] = permutation_bits(run.spec.rows)
            entry["patience"], entry["fault_step"] = int(PATIENCE_SECONDS * CLOCK_HZ), 2**63
            assert run.network is not None
            for place, dropout in enumerate(dropouts_of(stages_of(run.network))):
                scale = np.float32(keep_scale(dropout.p)).view(np.uint32)
                entry["keep"][2 * place : 2 * place + 2] = keep_threshold(dropout.p), scale
        return torch.from_numpy(params.view(np.uint8).copy()).to(self.device)

    # Results, after the launch.

    def write_back(self, members: Sequence[int]) -> None:
        """Copy the weights of these members into their models."""
        to, values = [], []
        for number in members:
            for (name, shape), part in zip(self._shapes, self.weights[number].split(self._sizes), strict=True):
                to.append(self._tensors[number][name])
                values.append(part.view(shape))
        if to:
            with torch.no_grad():
                torch._foreach_copy_(to, values)

    def state(self, member: int) -> State:
        """The optimizer's state of a member, under the names that all engines use."""
        found: State = {}
        for kind, flat in zip(self._kinds, self.states, strict=True):
            parts = flat[member].clone().split(self._sizes)
            found |= {
                f"{kind}.{name}": part.view(shape) for (name, shape), part in zip(self._shapes, parts, strict=True)
            }
        return found

    def losses(self) -> list[torch.Tensor]:
        """The losses of each member, on the CPU."""
        counts = np.diff(self._first_loss).tolist()
        return list(self._losses.cpu()[: sum(counts)].split(counts))

    def records(self) -> list[np.ndarray]:
        """The records of each member's epochs."""
        found = self._records.cpu().numpy().view(RECORD)
        return np.split(found, self._first_record[1:-1])
