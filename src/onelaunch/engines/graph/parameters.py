"""The weights and the optimizer's state of a run, where the kernels want them.

The fp32 weights are the model's own parameters, updated in place. A narrow network's lie in one padded vector instead, and
those of a small batch in bf16 in halves; both go back into the model when somebody looks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

import torch
from torch import nn

from onelaunch.engines.contract import State
from onelaunch.engines.graph.buffers import Buffers
from onelaunch.engines.graph.kernels.run_arguments import Weights
from onelaunch.engines.graph.kernels.split_weights import join_weights, split_weights
from onelaunch.engines.graph.plan.operations import StepPlan
from onelaunch.engines.graph.plan.stages import Stage


class Parameters:
    def __init__(
        self, model: nn.Module, stages: list[Stage], step: StepPlan, buffers: Buffers, state_names: tuple[str, ...],
        state: Mapping[str, torch.Tensor],
    ) -> None:  # fmt: skip
        """`state_names` are the tensors the optimizer keeps for a parameter; `state` is a snapshot's, or empty."""
        self._stages, self._step, self._buffers, self._state_names = stages, step, buffers, state_names
        self._parameters = dict(model.named_parameters())
        self._masters = {name: _aligned(p.detach().contiguous()) for name, p in self._parameters.items()}
        if step.narrow:
            self._pack()
        self.weights = [self._weights(number, state) for number in range(len(stages))]

    def _weights(self, number: int, state: Mapping[str, torch.Tensor]) -> Weights:
        linear = self._stages[number].linear
        tensors: dict[str, torch.Tensor | None] = {"bias": None}
        for part in ("weight", "bias") if linear.bias else ("weight",):
            name = f"{linear.path}.{part}"
            tensors[part] = self._masters[name]
            for place, kind in enumerate(self._state_names):
                kept = self._state(place, number, part)
                saved = state.get(f"{kind}.{name}")
                if saved is None:
                    kept.zero_()
                else:
                    kept.copy_(saved)
                tensors[f"{part}_{('first', 'second')[place]}"] = kept
        if f"high.{number}" in self._step.spaces:
            master, (high, low) = tensors["weight"], self._halves(number)
            assert master is not None
            split_weights(master, high, low)
            tensors |= {"weight": high, "low": low}
        if f"copy.{number}" in self._step.spaces:
            tensors["copy"] = self._buffers.take(f"copy.{number}").copy_(self._masters[f"{linear.path}.weight"])
        return Weights(**tensors)  # type: ignore[arg-type]

    def _state(self, place: int, number: int, part: str) -> torch.Tensor:
        if self._step.narrow:
            return self._packed(f"state{place}.packed", number, part)
        return self._buffers.take(f"state{place}.{number}.{part}")

    def _halves(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._buffers.take(f"high.{number}"), self._buffers.take(f"low.{number}")

    def _packed(self, buffer: str, number: int, part: str) -> torch.Tensor:
        """A parameter's place in one of the narrow step's vectors, without the padding."""
        assert self._step.narrow is not None
        offset, padded, shape = self._step.narrow.place(number, part)
        whole = self._buffers.take(buffer)[offset : offset + prod(padded)].view(padded)
        return whole[tuple(slice(size) for size in shape)]

    def _pack(self) -> None:
        take = self._buffers.take
        for name in ("packed", *(f"state{place}.packed" for place in range(len(self._state_names)))):
            take(name).zero_()  # the padding, which stays zero
        for number, part, name in self._parts():
            self._packed("packed", number, part).copy_(self._masters[name])
        if "packed_copy" in self._step.spaces:
            take("packed_copy").copy_(take("packed"))

    def _parts(self) -> Iterator[tuple[int, str, str]]:
        """(stage, weight or bias, the parameter's name)"""
        for number, stage in enumerate(self._stages):
            for part in ("weight", "bias") if stage.linear.bias else ("weight",):
                yield number, part, f"{stage.linear.path}.{part}"

    def write_back(self) -> None:
        """The weights into the model, where it does not hold them already."""
        with torch.no_grad():
            for number, part, name in self._parts():
                if self._step.narrow:
                    self._masters[name].copy_(self._packed("packed", number, part))
                if part == "weight" and f"high.{number}" in self._step.spaces:
                    join_weights(self._masters[name], *self._halves(number))
                if self._masters[name].data_ptr() != self._parameters[name].data_ptr():  # it is a copy
                    self._parameters[name].copy_(self._masters[name])

    def state(self) -> State:
        """The optimizer's, in the engines' common form."""
        return {
            f"{kind}.{name}": self._state(place, number, part).clone(memory_format=torch.contiguous_format)
            for number, part, name in self._parts()
            for place, kind in enumerate(self._state_names)
        }


def _aligned(parameter: torch.Tensor) -> torch.Tensor:
    """Itself, or a copy that begins on 16 bytes, which descriptors of tiles want."""
    return parameter if parameter.data_ptr() % 16 == 0 else parameter.clone()
