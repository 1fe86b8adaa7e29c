"""The weights and the optimizer's states of a run, in the form that the kernels use.

The fp32 weights are the model's own parameters, updated in place. Two kinds of step store them elsewhere: a narrow network in
one padded vector, and a small batch in bf16 as split weights. `write_back` copies these into the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import NamedTuple

import torch
from torch import nn

from onelaunch.engines.contract import State
from onelaunch.engines.graph.buffers import Buffers
from onelaunch.engines.graph.kernels.run_arguments import Weights
from onelaunch.engines.graph.kernels.split_weights import join_weights, split_weights
from onelaunch.engines.graph.plan.gradients import gradient_offsets
from onelaunch.engines.graph.plan.operations import StepPlan
from onelaunch.engines.graph.plan.stages import Stage
from onelaunch.run.network import tensor_name


class Gradients(NamedTuple):
    """Where a run that clips stores its gradients: in one vector.

    `weights` and `norms` are those of Parameters with views of the vector as their first states, for "store_gradient"
    (kernels/optimizer.py); a narrow network's kernels take the vector itself.
    """

    vector: torch.Tensor
    weights: list[Weights]
    norms: list[Weights | None]


class Parameters:
    def __init__(
        self, model: nn.Module, stages: list[Stage], step: StepPlan, buffers: Buffers, state_names: tuple[str, ...],
        state: Mapping[str, torch.Tensor],
    ) -> None:  # fmt: skip
        """`state_names` are the optimizer's states per parameter; `state` is that of a snapshot, or empty."""
        self._stages, self._step, self._buffers, self._state_names = stages, step, buffers, state_names
        self._parameters = dict(model.named_parameters())
        self._masters = {name: _aligned(p.detach().contiguous()) for name, p in self._parameters.items()}
        if step.narrow:
            self._pack()
        self.weights = [self._weights(number, state) for number in range(len(stages))]
        self.norms = [self._norm(number, state) for number in range(len(stages))]

    def _weights(self, number: int, state: Mapping[str, torch.Tensor]) -> Weights:
        linear = self._stages[number].linear
        tensors: dict[str, torch.Tensor | None] = {"bias": None}
        for part in ("weight", "bias") if linear.bias else ("weight",):
            name = tensor_name(linear.path, part)
            tensors[part] = self._masters[name]
            tensors |= self._states(number, part, part, name, state)
        if f"high.{number}" in self._step.buffers:
            master, (high, low) = tensors["weight"], self._words(number)
            assert master is not None
            split_weights(master, high, low)
            tensors |= {"weight": high, "low": low}
        if f"copy.{number}" in self._step.buffers:
            tensors["copy"] = self._buffers.take(f"copy.{number}").copy_(
                self._masters[tensor_name(linear.path, "weight")]
            )
        return Weights(**tensors)  # type: ignore[arg-type]

    def _states(
        self, number: int, part: str, field: str, name: str, state: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor | None]:
        """The optimizer's states of one parameter, restored or zero, by the names that `Weights` has for `field`."""
        found: dict[str, torch.Tensor | None] = {}
        for index, state_name in enumerate(self._state_names):
            tensor = self._state(index, number, part)
            saved = state.get(f"{state_name}.{name}")
            if saved is None:
                tensor.zero_()
            else:
                tensor.copy_(saved)
            found[f"{field}_{('first', 'second')[index]}"] = tensor
        return found

    def _norm(self, number: int, state: Mapping[str, torch.Tensor]) -> Weights | None:
        """Scale (as `weight`) and shift (as `bias`) of a stage's LayerNorm, with their states; None without either."""
        tensors: dict[str, torch.Tensor | None] = {"weight": None, "bias": None}
        for part, field, name in _norm_parts(self._stages[number]):
            tensors[field] = self._masters[name]
            tensors |= self._states(number, part, field, name, state)
        return Weights(**tensors) if any(tensor is not None for tensor in tensors.values()) else None  # type: ignore[arg-type]

    def gradients(self) -> Gradients | None:
        """The stored gradients, zero; None if the run does not clip."""
        if not self._step.clips:
            return None
        vector = self._buffers.take("gradients").zero_()  # what lies between the gradients stays zero
        if self._step.narrow:
            return Gradients(vector, self.weights, self.norms)
        offsets, _ = gradient_offsets(self._stages)

        def views(number: int, weight: str, bias: str) -> dict[str, torch.Tensor | None]:
            found: dict[str, torch.Tensor | None] = {"weight_second": None, "bias_second": None}
            for field, part in (("weight_first", weight), ("bias_first", bias)):
                offset, shape = offsets.get((number, part), (0, None))
                found[field] = None if shape is None else vector[offset : offset + prod(shape)].view(shape)
            return found

        return Gradients(
            vector,
            [one._replace(**views(number, "weight", "bias")) for number, one in enumerate(self.weights)],  # type: ignore[arg-type]
            [one and one._replace(**views(number, "scale", "shift")) for number, one in enumerate(self.norms)],  # type: ignore[arg-type]
        )

    def _state(self, index: int, number: int, part: str) -> torch.Tensor:
        if self._step.narrow:
            return self._packed(f"state{index}.packed", number, part)
        return self._buffers.take(f"state{index}.{number}.{part}")

    def _words(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._buffers.take(f"high.{number}"), self._buffers.take(f"low.{number}")

    def _packed(self, buffer: str, number: int, part: str) -> torch.Tensor:
        """The view of a parameter in one of the narrow step's vectors, without the padding."""
        assert self._step.narrow is not None
        offset, padded, shape = self._step.narrow.position(number, part)
        whole = self._buffers.take(buffer)[offset : offset + prod(padded)].view(padded)
        return whole[tuple(slice(size) for size in shape)]

    def _pack(self) -> None:
        take = self._buffers.take
        for name in ("packed", *(f"state{index}.packed" for index in range(len(self._state_names)))):
            take(name).zero_()  # the padding must be zero, and stays zero
        for number, part, name in self._parts():
            self._packed("packed", number, part).copy_(self._masters[name])
        if "packed_copy" in self._step.buffers:
            take("packed_copy").copy_(take("packed"))

    def _parts(self) -> Iterator[tuple[int, str, str]]:
        """(stage, "weight", "bias", "scale" or "shift", the parameter's name) of every parameter."""
        for number, stage in enumerate(self._stages):
            for part in ("weight", "bias") if stage.linear.bias else ("weight",):
                yield number, part, tensor_name(stage.linear.path, part)
            for part, _, name in _norm_parts(stage):
                yield number, part, name

    def write_back(self) -> None:
        """Copies the weights into the model, unless they are updated there."""
        with torch.no_grad():
            for number, part, name in self._parts():
                if self._step.narrow:
                    self._masters[name].copy_(self._packed("packed", number, part))
                if part == "weight" and f"high.{number}" in self._step.buffers:
                    join_weights(self._masters[name], *self._words(number))
                if self._masters[name].data_ptr() != self._parameters[name].data_ptr():  # it is a copy
                    self._parameters[name].copy_(self._masters[name])

    def state(self) -> State:
        """The optimizer's states, in the form that all engines share."""
        return {
            f"{state_name}.{name}": self._state(index, number, part).clone(memory_format=torch.contiguous_format)
            for number, part, name in self._parts()
            for index, state_name in enumerate(self._state_names)
        }


def _norm_parts(stage: Stage) -> Iterator[tuple[str, str, str]]:
    """("scale" or "shift", "weight" or "bias", the parameter's name) of the parameters of a stage's LayerNorm."""
    norm = stage.segment.norm if stage.segment else None
    if norm and norm.scale:
        yield "scale", "weight", tensor_name(norm.path, "weight")
    if norm and norm.shift:
        yield "shift", "bias", tensor_name(norm.path, "bias")


def _aligned(parameter: torch.Tensor) -> torch.Tensor:
    """The parameter, or a copy whose address is a multiple of 16, which TMA descriptors require."""
    return parameter if parameter.data_ptr() % 16 == 0 else parameter.clone()
