"""The device memory of a resident run: rows and targets as the kernel fetches them, weights and state in flat arrays."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from onelaunch.engines.contract import Run, State
from onelaunch.engines.resident.plan.plan import Plan
from onelaunch.engines.resident.plan.settings import K_TILE
from onelaunch.errors import OnelaunchError
from onelaunch.optimizers import OPTIMIZERS
from onelaunch.run.network import tensor_name


def rows_as_fetched(x: torch.Tensor, plan: Plan, precision: str) -> torch.Tensor:
    """Rows as the kernel fetches them: uint8, or planes of 16-bit numbers that add up to the value; whole k tiles."""
    x = x.reshape(len(x), -1)
    width = plan.layers[0].k_tiles * K_TILE
    if x.dtype == torch.uint8:
        x = torch.nn.functional.pad(x, (0, width - x.shape[1])).contiguous()
        return x if x.data_ptr() % 16 == 0 else x.clone()  # rows are fetched 16 bytes at a time
    dtype = torch.float16 if precision == "fp16" else torch.bfloat16
    rest, planes = torch.nn.functional.pad(x.float(), (0, width - x.shape[1])), []
    for _ in range(plan.input_planes):
        planes.append(rest.to(dtype))
        rest = rest - planes[-1].float()
    return torch.stack(planes).contiguous()


def targets_as_fetched(y: torch.Tensor, plan: Plan, weights: torch.Tensor | None = None) -> torch.Tensor:
    """int32 classes `[rows, 1]` for cross_entropy, else floats `[rows, outputs]`.

    Where the plan is for weighted rows, one more column has the bits of the rows' weights: 1.0 if `weights` is None.
    """
    columns = y.reshape(len(y), -1)
    columns = columns.to(torch.int32) if plan.settings.loss == "cross_entropy" else columns.float()
    if plan.settings.weighted:
        column = torch.ones(len(y), device=y.device) if weights is None else weights.to(y.device, torch.float32)
        columns = torch.cat([columns, column[:, None].view(columns.dtype)], dim=1)
    return columns.contiguous()


def parameter_shapes(plan: Plan) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the parameters, in the order of the flat arrays."""
    found: list[tuple[str, tuple[int, ...]]] = []
    for layer in plan.layers:
        linear = layer.stage.linear
        found.append((tensor_name(linear.path, "weight"), (linear.outputs, linear.inputs)))
        if linear.bias:
            found.append((tensor_name(linear.path, "bias"), (linear.outputs,)))
    return found


class Buffers:
    def __init__(self, run: Run, plan: Plan, precision: str, state: Mapping[str, torch.Tensor]) -> None:
        self.run, self.plan, self.precision = run, plan, precision
        self.tensors = dict(run.model.state_dict(keep_vars=True))
        self.state_kinds = OPTIMIZERS[run.spec.optimizer].state_names(run.spec.momentum)
        try:
            with torch.no_grad():
                self._fill(state)
        except torch.cuda.OutOfMemoryError as error:
            needed = run.x.numel() * plan.input_planes * plan.input_bytes / 2**20
            raise OnelaunchError(
                f"engine='resident' finds too little memory on {run.device} for x as it reads it ({needed:.0f} MiB): "
                "free some, or pass engine='eager'"
            ) from error

    def _fill(self, state: Mapping[str, torch.Tensor]) -> None:
        run, plan = self.run, self.plan
        self.by_name: dict[str, torch.Tensor] = {
            "x": rows_as_fetched(run.x, plan, self.precision),
            "y": targets_as_fetched(run.y, plan, run.weights),
            "weights": self._flat(self.tensors),
            "exchange": torch.zeros(max(plan.exchange.size // 4, 1), dtype=torch.int32, device=run.device),
            "flags": torch.zeros(plan.flag_words, dtype=torch.int32, device=run.device),
            "stamps": torch.zeros(256, dtype=torch.int32, device=run.device),
        }
        if run.validation:
            x, y = run.validation
            self.by_name |= {
                "validation_x": rows_as_fetched(x, plan, self.precision),
                "validation_y": targets_as_fetched(y, plan),
            }
        for number, kind in enumerate(self.state_kinds):
            self.by_name[f"state{number}"] = self._flat({name: state.get(f"{kind}.{name}") for name in self.tensors})

    def _flat(self, tensors: Mapping[str, torch.Tensor | None]) -> torch.Tensor:
        parts, device = [], self.run.device
        for name, shape in parameter_shapes(self.plan):
            tensor = tensors.get(name)
            values = torch.zeros(shape, device=device) if tensor is None else tensor.detach().to(device).float()
            parts.append(values.reshape(-1))
        return torch.cat(parts)

    def _unflat(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        names = parameter_shapes(self.plan)
        parts = flat.split([math.prod(shape) for _, shape in names])
        return {name: part.reshape(shape) for (name, shape), part in zip(names, parts, strict=True)}

    def write_back(self) -> None:
        """Copy the weights into the model."""
        with torch.no_grad():
            for name, values in self._unflat(self.by_name["weights"]).items():
                self.tensors[name].copy_(values)

    def state(self) -> State:
        """The optimizer's state, under the names that all engines use."""
        found: State = {}
        for number, kind in enumerate(self.state_kinds):
            flat = self.by_name[f"state{number}"]
            found |= {f"{kind}.{name}": tensor.clone() for name, tensor in self._unflat(flat).items()}
        return found
