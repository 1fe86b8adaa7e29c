"""What a resident run has on the device: rows and targets as the kernel fetches them, weights and state in flat arrays."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch

from onelaunch.engines.contract import Run, State
from onelaunch.engines.resident.plan.units_plan import Plan
from onelaunch.errors import OnelaunchError
from onelaunch.optimizers import OPTIMIZERS


class Buffers:
    def __init__(self, run: Run, layout: Plan, precision: str, state: Mapping[str, torch.Tensor]) -> None:
        self.run, self.layout, self.precision = run, layout, precision
        self.tensors = dict(run.model.state_dict(keep_vars=True))
        self.state_kinds = OPTIMIZERS[run.spec.optimizer].state_names(run.spec.momentum)
        try:
            with torch.no_grad():
                self._fill(state)
        except torch.cuda.OutOfMemoryError as error:
            needed = run.x.numel() * layout.input_planes * layout.input_bytes / 2**20
            raise OnelaunchError(
                f"engine='resident' finds too little memory on {run.device} for x as it reads it ({needed:.0f} MiB): "
                "free some, or pass engine='eager'"
            ) from error

    def _fill(self, state: Mapping[str, torch.Tensor]) -> None:
        run, layout = self.run, self.layout
        check = run.validation
        self.by_name: dict[str, torch.Tensor] = {
            "x": self._rows(run.x),
            "y": self._targets(run.y),
            "weights": self._flat(self.tensors),
            "exchange": torch.zeros(max(layout.exchange.size // 4, 1), dtype=torch.int32, device=run.device),
            "flags": torch.zeros(layout.flag_words, dtype=torch.int32, device=run.device),
            "stamps": torch.zeros(256, dtype=torch.int32, device=run.device),
        }
        if check:
            self.by_name |= {"check_x": self._rows(check[0]), "check_y": self._targets(check[1])}
        for number, kind in enumerate(self.state_kinds):
            self.by_name[f"state{number}"] = self._flat({name: state.get(f"{kind}.{name}") for name in self.tensors})

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        """Rows as the kernel fetches them: bytes, or planes of half precision whose sum the value is; whole steps of 16."""
        x = x.reshape(len(x), -1)
        width = self.layout.layers[0].steps * 16
        if x.dtype == torch.uint8:
            x = torch.nn.functional.pad(x, (0, width - x.shape[1])).contiguous()
            return x if x.data_ptr() % 16 == 0 else x.clone()  # rows are fetched in pieces of 16 bytes
        half = torch.float16 if self.precision == "fp16" else torch.bfloat16
        rest, planes = torch.nn.functional.pad(x.float(), (0, width - x.shape[1])), []
        for _ in range(self.layout.input_planes):
            planes.append(rest.to(half))
            rest = rest - planes[-1].float()
        return torch.stack(planes).contiguous()

    def _targets(self, y: torch.Tensor) -> torch.Tensor:
        if self.run.spec.loss == "cross_entropy":
            return y.to(torch.int32).contiguous()
        return y.reshape(len(y), -1).float().contiguous()

    def _names(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        for layer in self.layout.layers:
            linear = layer.stage.linear
            yield f"{linear.path}.weight", (linear.outputs, linear.inputs)
            if linear.bias:
                yield f"{linear.path}.bias", (linear.outputs,)

    def _flat(self, tensors: Mapping[str, torch.Tensor | None]) -> torch.Tensor:
        parts, device = [], self.run.device
        for name, shape in self._names():
            tensor = tensors.get(name)
            values = torch.zeros(shape, device=device) if tensor is None else tensor.detach().to(device).float()
            parts.append(values.reshape(-1))
        return torch.cat(parts)

    def _unflat(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        found, at = {}, 0
        for name, shape in self._names():
            size = math.prod(shape)
            found[name] = flat[at : at + size].reshape(shape)
            at += size
        return found

    def write_back(self) -> None:
        """The weights into the model."""
        with torch.no_grad():
            for name, values in self._unflat(self.by_name["weights"]).items():
                self.tensors[name].copy_(values)

    def state(self) -> State:
        """The optimizer's state, under the names of all engines."""
        found: State = {}
        for number, kind in enumerate(self.state_kinds):
            flat = self.by_name[f"state{number}"]
            found |= {f"{kind}.{name}": tensor.clone() for name, tensor in self._unflat(flat).items()}
        return found
