"""The update of one vector of parameters, given its gradient: the finish of every dW tile, so that gradients never reach
memory. PyTorch's formulas; per step and from the host, in double precision until the last moment:

  rate          -lr (sgd);  -lr / (1 - beta1**t) (adam, adamw)
  inverse_root  1 / sqrt(1 - beta2**t)
  decay         1 - lr * weight_decay (adamw)
"""

from __future__ import annotations

from onelaunch.engines.cpu.code import vector_math
from onelaunch.engines.cpu.code.emit import Function
from onelaunch.engines.cpu.code.instructions import Value
from onelaunch.engines.cpu.plan.plan import HYPERPARAMETERS, SCALARS, Plan


class Update:
    """Emits updates inside one function. `scalars` points at the step's scalars, `hyper` at the run's hyperparameters."""

    def __init__(self, f: Function, plan: Plan, scalars: Value, hyper: Value) -> None:
        self.f, self.plan, self.settings = f, plan, plan.settings
        self._places = {name: (scalars, place) for place, name in enumerate(SCALARS)}
        self._places |= {name: (hyper, place) for place, name in enumerate(HYPERPARAMETERS)}
        self._loaded: dict[str, Value] = {}

    def _scalar(self, name: str) -> Value:
        if name not in self._loaded:
            pointer, place = self._places[name]
            self._loaded[name] = self.f.splat(self.f.load("float", pointer, place, hint=name), name)
        return self._loaded[name]

    def apply(self, gradient: Value, parameters: Value, index: int) -> None:
        """Update the vector at `parameters[index]`."""
        f, settings = self.f, self.settings
        weight = f.vload(parameters, index, "weight")
        if settings.optimizer == "sgd":
            new = self._sgd(gradient, weight, parameters, index)
        else:
            new = self._adam(gradient, weight, parameters, index)
        f.store(new, parameters, index)

    def _state(self, parameters: Value, number: int) -> Value:
        return self.f.at(parameters, (number + 1) * self.plan.state_stride // 4, hint="state")

    def _sgd(self, gradient: Value, weight: Value, parameters: Value, index: int) -> Value:
        f, settings = self.f, self.settings
        if settings.weight_decay:
            gradient = f.fma(self._scalar("weight_decay"), weight, gradient, "gradient")
        if settings.momentum:
            momentum, state = self._scalar("momentum"), self._state(parameters, 0)
            velocity = f.fma(momentum, f.vload(state, index), gradient, "velocity")
            f.store(velocity, state, index)
            gradient = f.fma(momentum, velocity, gradient, "step") if settings.nesterov else velocity
        return f.fma(self._scalar("rate"), gradient, weight, "weight")

    def _adam(self, gradient: Value, weight: Value, parameters: Value, index: int) -> Value:
        f, settings = self.f, self.settings
        if settings.weight_decay and settings.optimizer == "adam":
            gradient = f.fma(self._scalar("weight_decay"), weight, gradient, "gradient")
        first, second = self._state(parameters, 0), self._state(parameters, 1)
        mean = f.vload(first, index, "mean")
        mean = f.fma(f.fsub(gradient, mean), self._scalar("new_mean"), mean, "mean")
        square = f.vload(second, index, "square")
        square = f.fma(self._scalar("beta2"), square, f.fmul(f.fmul(gradient, gradient), self._scalar("new_square")))
        f.store(mean, first, index)
        f.store(square, second, index)
        root = vector_math.root(f, square)
        scale = f.fma(root, self._scalar("inverse_root"), self._scalar("eps"), "scale")
        if settings.weight_decay and settings.optimizer == "adamw":
            weight = f.fmul(weight, self._scalar("decay"), "decayed")
        return f.fma(self._scalar("rate"), vector_math.divide(f, mean, scale), weight, "weight")
