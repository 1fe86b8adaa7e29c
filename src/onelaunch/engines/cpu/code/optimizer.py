"""The update of one vector of parameters, given its gradient. It is the epilogue of every dW tile, so that gradients never
reach memory. The formulas are PyTorch's; `onelaunch.optimizers` defines the scalars they read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onelaunch.engines.cpu.code import vector_math
from onelaunch.engines.cpu.code.emit import Function
from onelaunch.engines.cpu.code.instructions import Int, Value
from onelaunch.engines.cpu.plan.settings import HYPERPARAMETERS, SCALARS
from onelaunch.optimizers import OPTIMIZERS


@dataclass(frozen=True)
class UpdateRule:
    """What the code of an update depends on; all other hyper-parameters are read at run time."""

    optimizer: str
    momentum: bool = False
    nesterov: bool = False
    weight_decay: bool = False
    stores: bool = (
        False  # the gradient is stored; its norm or the other partitions' sums must be known before the update
    )

    @property
    def is_short(self) -> bool:
        """Whether an update is a few instructions only."""
        return self.stores or not self.state_names

    @property
    def state_names(self) -> tuple[str, ...]:
        return OPTIMIZERS[self.optimizer].state_names(self.momentum)


class Update:
    """Emits updates inside one function. `scalars` points at the step's scalars, `hyper` at the run's hyper-parameters."""

    def __init__(self, f: Function, rule: UpdateRule, scalars: Value, hyper: Value) -> None:
        self.f, self.rule = f, rule
        self._addresses = {name: (scalars, column) for column, name in enumerate(SCALARS)}
        self._addresses |= {name: (hyper, column) for column, name in enumerate(HYPERPARAMETERS)}
        self._loaded: dict[str, Value] = {}
        for name in self._names():
            pointer, column = self._addresses[name]
            self._loaded[name] = f.splat(f.load("float", pointer, column, hint=name), name)

    def _names(self) -> list[str]:
        """The scalars that the update reads. They are loaded where `Update` is made: the updates may be in other blocks."""
        names = {
            "sgd": ["momentum"] * self.rule.momentum, "adam": ["new_mean", "beta2", "new_square", "inverse_root", "eps"],
            "rmsprop": ["beta2", "new_square", "eps", *(["momentum"] * self.rule.momentum)],
            "lion": ["new_mean", "new_square"],
        }  # fmt: skip
        names["adamw"] = names["adam"]
        decoupled = OPTIMIZERS[self.rule.optimizer].decoupled_decay
        decay = ["decay" if decoupled else "weight_decay"] * self.rule.weight_decay
        return ["rate", *decay, *names[self.rule.optimizer]]

    def copies(self, parameters: Value, state_stride: Value) -> list[Value]:
        """The addresses of the parameters, of their optimizer states and of their gradient, where it is stored. They are
        `state_stride` bytes apart."""
        found = [parameters]
        for name in [*self.rule.state_names, *["gradient"] * self.rule.stores]:
            found.append(self.f.at(found[-1], state_stride, "i8", name))
        return found

    def apply(self, gradient: Value, copies: Sequence[Value], index: Int) -> None:
        """Update the vector at `index` of `copies`, or store its gradient."""
        if self.rule.stores:
            self.f.store(gradient, copies[-1], index)
        else:
            self.step(gradient, copies, index)

    def step(self, gradient: Value, copies: Sequence[Value], index: Int) -> None:
        """Update the vector at `index` of `copies`: the parameters and their states."""
        f, rule = self.f, self.rule
        copies = copies[: 1 + len(rule.state_names)]
        weight = f.vload(copies[0], index, "weight")
        states = [f.at(copy, index, hint=name) for copy, name in zip(copies[1:], rule.state_names, strict=True)]
        decoupled = OPTIMIZERS[rule.optimizer].decoupled_decay
        if rule.weight_decay and not decoupled:
            gradient = f.fma(self._loaded["weight_decay"], weight, gradient, "gradient")
        match rule.optimizer:
            case "sgd":
                step = self._sgd(gradient, states)
            case "adam" | "adamw":
                step = self._adam(gradient, *states)
            case "rmsprop":
                step = self._rmsprop(gradient, *states)
            case "lion":
                step = self._lion(gradient, *states)
            case _:
                raise AssertionError(rule.optimizer)
        if rule.weight_decay and decoupled:
            weight = f.fmul(weight, self._loaded["decay"], "decayed")
        f.store(f.fma(self._loaded["rate"], step, weight, "weight"), copies[0], index)

    def _sgd(self, gradient: Value, states: list[Value]) -> Value:
        f = self.f
        if not states:
            return gradient
        velocity = self._add_momentum(gradient, states[0])
        return f.fma(self._loaded["momentum"], velocity, gradient, "step") if self.rule.nesterov else velocity

    def _add_momentum(self, step: Value, buffer: Value) -> Value:
        velocity = self.f.fma(self._loaded["momentum"], self.f.vload(buffer), step, "velocity")
        self.f.store(velocity, buffer)
        return velocity

    def _adam(self, gradient: Value, exp_avg: Value, exp_avg_sq: Value) -> Value:
        f = self.f
        mean = f.vload(exp_avg, hint="mean")
        mean = f.fma(f.fsub(gradient, mean), self._loaded["new_mean"], mean, "mean")
        square = self._new_square(gradient, exp_avg_sq)
        f.store(mean, exp_avg)
        f.store(square, exp_avg_sq)
        root = vector_math.root(f, square)
        scale = f.fma(root, self._loaded["inverse_root"], self._loaded["eps"], "scale")
        return vector_math.divide(f, mean, scale)

    def _new_square(self, gradient: Value, average: Value) -> Value:
        f = self.f
        square = f.vload(average, hint="square")
        return f.fma(self._loaded["beta2"], square, f.fmul(f.fmul(gradient, gradient), self._loaded["new_square"]))

    def _rmsprop(self, gradient: Value, square_avg: Value, momentum: Value | None = None) -> Value:
        f = self.f
        square = self._new_square(gradient, square_avg)
        f.store(square, square_avg)
        root = vector_math.root(f, square)
        step = vector_math.divide(f, gradient, f.fadd(root, self._loaded["eps"], "scale"))
        return step if momentum is None else self._add_momentum(step, momentum)

    def _lion(self, gradient: Value, exp_avg: Value) -> Value:
        f = self.f
        mean = f.vload(exp_avg, hint="mean")
        gap = f.fsub(gradient, mean)
        direction = f.fma(gap, self._loaded["new_mean"], mean, "direction")
        f.store(f.fma(gap, self._loaded["new_square"], mean, "mean"), exp_avg)
        negative = f.select(f.compare("olt", direction, f.zero), f.constant(-1.0), f.zero)
        return f.select(f.compare("ogt", direction, f.zero), f.constant(1.0), negative, "sign")
