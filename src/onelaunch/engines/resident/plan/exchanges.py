"""The exchanges of a plan by units, numbered: values of each hidden layer, then deltas and weights of each but the first, then
what the last layer needs, then the decision to go on."""

from __future__ import annotations

from abc import ABC, abstractmethod

from onelaunch.engines.resident.plan.layers import Layer
from onelaunch.engines.resident.plan.settings import FLAG_STRIDE


class Exchanges(ABC):
    layers: tuple[Layer, ...]
    blocks: int

    @property
    @abstractmethod
    def sums_outputs(self) -> bool:
        """Whether the outputs are summed over the blocks."""

    @abstractmethod
    def publishes(self, layer: Layer) -> bool:
        """Whether everyone gets the values of a hidden layer."""

    @property
    def hidden(self) -> int:
        return len(self.layers) - 1

    def values_exchange(self, layer: Layer) -> int:
        return layer.index

    def deltas_exchange(self, layer: Layer) -> int:
        return self.hidden + layer.index - 1

    def back_exchange(self, layer: Layer) -> int:
        return 2 * self.hidden - 1 + layer.index - 1

    @property
    def last_exchange(self) -> int:
        return max(0, 3 * self.hidden - 2)

    @property
    def decision(self) -> int:
        return self.last_exchange + (self.hidden > 0)

    @property
    def exchanges(self) -> int:
        return self.decision + 1

    def exchange_names(self) -> dict[int, str]:
        names = {self.last_exchange: "the weights of the last layer", self.decision: "the decision to go on"}
        if self.sums_outputs:
            names[self.last_exchange] = "the gradient of the outputs"
        for layer in self.layers[: self.hidden]:
            values = f"the values of layer {layer.index}" if self.publishes(layer) else "the partial outputs"
            names[self.values_exchange(layer)] = values
            if not layer.first:
                names[self.deltas_exchange(layer)] = f"the deltas of layer {layer.index}"
                names[self.back_exchange(layer)] = f"the weights of layer {layer.index}"
        return names

    @property
    def flag_words(self) -> int:
        return self.exchanges * self.blocks * FLAG_STRIDE
