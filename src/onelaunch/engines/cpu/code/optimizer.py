"""The update of one vector of parameters, given its gradient. It is the epilogue of every dW tile, so that gradients never
reach memory. The formulas are PyTorch's; `onelaunch.optimizers` defines the scalars they read."""

from __future__ import annotations

from onelaunch.engines.cpu.code import vector_math
from onelaunch.engines.cpu.code.emit import Function
from onelaunch.engines.cpu.code.instructions import Value
from onelaunch.engines.cpu.plan.plan import HYPERPARAMETERS, SCALARS, Plan
from onelaunch.optimizers import OPTIMIZERS


class Update:
    """Emits updates inside one function. `scalars` points at the step's scalars, `hyper` at the run's hyper-parameters."""

    def __init__(self, f: Function, plan: Plan, scalars: Value, hyper: Value) -> None:
        self.f, self.plan, self.settings = f, plan, plan.settings
        self._addresses = {name: (scalars, column) for column, name in enumerate(SCALARS)}
        self._addresses |= {name: (hyper, column) for column, name in enumerate(HYPERPARAMETERS)}
        self._loaded: dict[str, Value] = {}

    def _scalar(self, name: str) -> Value:
        if name not in self._loaded:
            pointer, column = self._addresses[name]
            self._loaded[name] = self.f.splat(self.f.load("float", pointer, column, hint=name), name)
        return self._loaded[name]

    def apply(self, gradient: Value, parameters: Value, index: int) -> None:
        """Update the vector at `parameters[index]`, or store its gradient where it must be clipped first (see clip.py)."""
        if self.settings.clips:
            self.f.store(gradient, parameters, self.plan.gradient_shift // 4 + index)
        else:
            self.step(gradient, parameters, index)

    def step(self, gradient: Value, parameters: Value, index: int) -> None:
        """Update the vector at `parameters[index]`."""
        f, settings = self.f, self.settings
        weight = f.vload(parameters, index, "weight")
        states = [
            f.at(parameters, (number + 1) * self.plan.state_stride // 4 + index, hint=name)
            for number, name in enumerate(self.plan.state_names)
        ]
        decoupled = OPTIMIZERS[settings.optimizer].decoupled_decay
        if settings.weight_decay and not decoupled:
            gradient = f.fma(self._scalar("weight_decay"), weight, gradient, "gradient")
        match settings.optimizer:
            case "sgd":
                step = self._sgd(gradient, states)
            case "adam" | "adamw":
                step = self._adam(gradient, *states)
            case "rmsprop":
                step = self._rmsprop(gradient, *states)
            case "lion":
                step = self._lion(gradient, *states)
            case _:
                raise AssertionError(settings.optimizer)
        if settings.weight_decay and decoupled:
            weight = f.fmul(weight, self._scalar("decay"), "decayed")
        f.store(f.fma(self._scalar("rate"), step, weight, "weight"), parameters, index)

    def _sgd(self, gradient: Value, states: list[Value]) -> Value:
        f = self.f
        if not states:
            return gradient
        velocity = self._add_momentum(gradient, states[0])
        return f.fma(self._scalar("momentum"), velocity, gradient, "step") if self.settings.nesterov else velocity

    def _add_momentum(self, step: Value, buffer: Value) -> Value:
        velocity = self.f.fma(self._scalar("momentum"), self.f.vload(buffer), step, "velocity")
        self.f.store(velocity, buffer)
        return velocity

    def _adam(self, gradient: Value, exp_avg: Value, exp_avg_sq: Value) -> Value:
        f = self.f
        mean = f.vload(exp_avg, hint="mean")
        mean = f.fma(f.fsub(gradient, mean), self._scalar("new_mean"), mean, "mean")
        square = self._new_square(gradient, exp_avg_sq)
        f.store(mean, exp_avg)
        f.store(square, exp_avg_sq)
        root = vector_math.root(f, square)
        scale = f.fma(root, self._scalar("inverse_root"), self._scalar("eps"), "scale")
        self._scalar("rate")  # before the division: so LLVM allocates registers as it did for the recorded times
        return vector_math.divide(f, mean, scale)

    def _new_square(self, gradient: Value, average: Value) -> Value:
        f = self.f
        square = f.vload(average, hint="square")
        return f.fma(self._scalar("beta2"), square, f.fmul(f.fmul(gradient, gradient), self._scalar("new_square")))

    def _rmsprop(self, gradient: Value, square_avg: Value, momentum: Value | None = None) -> Value:
        f = self.f
        square = self._new_square(gradient, square_avg)
        f.store(square, square_avg)
        root = vector_math.root(f, square)
        step = vector_math.divide(f, gradient, f.fadd(root, self._scalar("eps"), "scale"))
        return step if momentum is None else self._add_momentum(step, momentum)

    def _lion(self, gradient: Value, exp_avg: Value) -> Value:
        f = self.f
        mean = f.vload(exp_avg, hint="mean")
        gap = f.fsub(gradient, mean)
        direction = f.fma(gap, self._scalar("new_mean"), mean, "direction")
        f.store(f.fma(gap, self._scalar("new_square"), mean, "mean"), exp_avg)
        negative = f.select(f.compare("olt", direction, f.zero), f.constant(-1.0), f.zero)
        return f.select(f.compare("ogt", direction, f.zero), f.constant(1.0), negative, "sign")
