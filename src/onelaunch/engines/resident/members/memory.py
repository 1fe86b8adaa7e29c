"""The device memory of many members: rows that they share, weights and state in flat arrays, the table of their parameters."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from onelaunch.engines.contract import Run, State
from onelaunch.engines.members import MemberTask
from onelaunch.engines.resident.batch_weights import BatchWeights
from onelaunch.engines.resident.buffers import parameter_shapes, rows_as_fetched, targets_as_fetched
from onelaunch.engines.resident.members.group import same_tensor
from onelaunch.engines.resident.members.slices import Slice
from onelaunch.engines.resident.plan.plan import Plan
from onelaunch.engines.resident.plan.stages import dropouts_of, stages_of
from onelaunch.engines.resident.session import CLOCK_HZ, PARAMS, PATIENCE_SECONDS, RECORD, run_values
from onelaunch.engines.resident.uint8_rows import as_uint8
from onelaunch.optimizers import OPTIMIZERS
from onelaunch.rng import keep_scale, keep_threshold, permutation_bits

if TYPE_CHECKING:
    from onelaunch.nvrtc.launch import LoadedKernel

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
        self._made: dict[Key, tuple[tuple[torch.Tensor | None, ...], torch.Tensor]] = {}  # and sources, not to be freed

    def x(self, x: torch.Tensor) -> int:
        return self._once("x", x, self._rows)

    def y(self, y: torch.Tensor, weights: torch.Tensor | None = None) -> int:
        return self._once("y", y, lambda y: targets_as_fetched(y, self.plan, weights), weights)

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

    def _once(
        self, kind: str, tensor: torch.Tensor, make: Callable[[torch.Tensor], torch.Tensor],
        more: torch.Tensor | None = None,
    ) -> int:  # fmt: skip
        """The address of what `make` gives; `more` is another tensor that it depends on."""
        key = (kind, *same_tensor(tensor), None if more is None else same_tensor(more))
        if key not in self._made:
            self._made[key] = (tensor, more), make(tensor)
        return self._made[key][1].data_ptr()


class MembersMemory:
    """The memory of one launch: entry i belongs to `tasks[i]`. `summing`: the kernel `sum_weights`, if rows have weights."""

    def __init__(
        self, tasks: Sequence[MemberTask], plan: Plan, rows: SharedRows, places: int,
        summing: LoadedKernel | None = None,
    ) -> None:  # fmt: skip
        self.tasks, self.plan, self.device = tasks, plan, tasks[0].run.device
        self._shapes = parameter_shapes(plan)
        self._sizes = [math.prod(shape) for _, shape in self._shapes]
        self._tensors = [dict(task.run.model.named_parameters()) for task in tasks]
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
        self.batch_weights = BatchWeights(int(self._first_loss[-1]), summing) if summing else None
        self._rows = rows

    def _flat(self, tensors: Sequence[Mapping[str, Any]]) -> torch.Tensor:
        """`[members, parameters]`; zeros where a member has no such tensor."""
        flat = torch.zeros(len(tensors), sum(self._sizes), device=self.device)
        given, places = [], []
        for (name, _), views in zip(self._shapes, self._views(flat), strict=True):
            for member, view in zip(tensors, views, strict=True):
                if (tensor := member.get(name)) is not None:
                    given.append(tensor)
                    places.append(view)
        if given:
            torch._foreach_copy_(places, given)
        return flat

    def _views(self, flat: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
        """The tensors of each parameter, one per member."""
        parts = flat.split(self._sizes, dim=1)
        return [part.view(len(flat), *shape).unbind() for (_, shape), part in zip(self._shapes, parts, strict=True)]

    def _flat_state(self, kind: str) -> torch.Tensor:
        if not any(task.state for task in self.tasks):
            return torch.zeros_like(self.weights)
        names = [name for name, _ in self._shapes]
        return self._flat([{name: task.state.get(f"{kind}.{name}") for name in names} for task in self.tasks])

    def table(self, control_address: int, control_bytes: int, slices: Sequence[Slice]) -> torch.Tensor:
        """The parameters of all slices, on the device."""
        params, numbers = np.zeros(len(self.tasks), PARAMS), np.arange(len(self.tasks), dtype=np.uint64)
        values = [run_values(task.run) | self._row_values(task) for task in self.tasks]
        for name in values[0]:
            params[name] = [value[name] for value in values]
        row_bytes = self.weights[0].nbytes
        params["weights"] = self.weights.data_ptr() + numbers * row_bytes
        for place, state in enumerate(self.states):
            params[f"state{place}"] = state.data_ptr() + numbers * row_bytes
        params["losses"] = self._losses.data_ptr() + self._first_loss[:-1] * 4
        params["records"] = self._records.data_ptr() + self._first_record[:-1] * RECORD.itemsize
        if self.batch_weights is not None:
            params["batch_weights"] = self.batch_weights.sums.data_ptr() + self._first_loss[:-1] * 8
        params["patience"], params["fault_step"] = int(PATIENCE_SECONDS * CLOCK_HZ), 2**63
        for entry, task in zip(params["keep"], self.tasks, strict=True):
            assert task.run.network is not None
            for place, dropout in enumerate(dropouts_of(stages_of(task.run.network))):
                scale = np.float32(keep_scale(dropout.p)).view(np.uint32)
                entry[2 * place : 2 * place + 2] = keep_threshold(dropout.p), scale
        member, first, last, epochs = np.array(slices, np.int64).T
        table = params[member]
        table["losses"] += (4 * (first - table["first_step"].astype(np.int64))).astype(np.uint64)
        table["records"] += (RECORD.itemsize * epochs).astype(np.uint64)
        table["first_step"], table["last_step"] = first, last
        table["control"] = control_address + np.arange(len(table), dtype=np.uint64) * control_bytes
        return torch.from_numpy(table.view(np.uint8)).to(self.device)

    def _row_values(self, task: MemberTask) -> dict[str, int]:
        """The parameters that say which rows a member reads, and which steps it takes."""
        run, rows = task.run, self._rows
        validation_x, validation_y = run.validation or (None, None)
        return {
            "x": rows.x(run.x), "y": rows.y(run.y, run.weights),
            "validation_x": 0 if validation_x is None else rows.x(validation_x),
            "validation_y": 0 if validation_y is None else rows.y(validation_y),
            "row_numbers": 0 if run.train_rows is None else rows.numbers(run.train_rows, self.device),
            "first_step": task.first_step, "last_step": task.last_step, "permutation_bits": permutation_bits(run.spec.rows),
        }  # fmt: skip

    # Results, after the launch.

    @functools.cached_property
    def on_host(self) -> torch.Tensor:
        """Host memory for the losses, taken while the launch runs: the system gives it more slowly than they are copied."""
        return torch.full(self._losses.shape, math.nan)

    def write_back(self, members: Sequence[int]) -> None:
        """Copy the weights of these members into their models."""
        to, values = list[torch.Tensor](), list[torch.Tensor]()
        for (name, _), views in zip(self._shapes, self._views(self.weights), strict=True):
            to += [self._tensors[number][name] for number in members]
            values += [views[number] for number in members]
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

    def losses(self) -> tuple[list[torch.Tensor], dict[int, int]]:
        """The losses of each member, on the CPU, and the first position of each whose losses stop being finite."""
        positions = torch.nonzero(~self._losses.isfinite()).flatten().cpu().numpy()
        members, first = np.unique(np.searchsorted(self._first_loss, positions, side="right") - 1, return_index=True)
        broken = dict(zip(members.tolist(), (positions[first] - self._first_loss[members]).tolist(), strict=True))
        return self._by_member(self.on_host.copy_(self._losses)), broken

    def weights_of_batches(self) -> list[torch.Tensor] | None:
        """The summed row weights of each member's steps, on the CPU; None where no member has any."""
        return None if self.batch_weights is None else self._by_member(self.batch_weights.sums.cpu())

    def _by_member(self, of_steps: torch.Tensor) -> list[torch.Tensor]:
        counts = np.diff(self._first_loss).tolist()
        return list(of_steps[: sum(counts)].split(counts))

    def records(self) -> list[np.ndarray]:
        """The records of each member's epochs."""
        found = self._records.cpu().numpy().view(RECORD)
        return np.split(found, self._first_record[1:-1])
