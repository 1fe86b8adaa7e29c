"""The plan of a run on the CPU: the work of each partition (division.py) and the layout of the arena (layout.py)."""

from __future__ import annotations

from onelaunch.engines.cpu.plan.division import Division
from onelaunch.engines.cpu.plan.layout import Layout
from onelaunch.engines.cpu.plan.settings import Settings
from onelaunch.engines.cpu.plan.stages import Add, Stage
from onelaunch.engines.cpu.plan.target import Target
from onelaunch.run.network import Activation


class Plan(Division):
    """A division of the work and the buffers it needs. Pure: no LLVM, no torch."""

    def __init__(self, settings: Settings, target: Target) -> None:
        super().__init__(settings, target)
        layout = Layout(self)
        self.buffers, self.parameters, self.size = layout.buffers, layout.parameters, layout.size
        self.state_stride = layout.state_stride

    def gradient_shift(self, partition: int) -> int:
        """Bytes from a parameter to its stored gradient; in a plan by rows, to that of a partition's rows."""
        first = self.partitions * self.copy_stride if self.private_weights else self.copy_stride
        return first + (self.state_stride * partition if self.by_rows else 0)

    @property
    def copy_stride(self) -> int:
        """Bytes of all parameters with their optimizer states, and from one copy of them to the next."""
        return self.state_stride * (1 + len(self.settings.state_names))

    def __str__(self) -> str:
        settings = self.settings
        when = "update after the norm of the gradient is known" if settings.clips else "update inside dW"
        when = "update with the sum of all partitions' gradients" if self.by_rows else when
        return "\n".join([
            f"native code for {self.target}",
            f"network {settings.network}, batch {settings.batch}, {settings.optimizer}, {settings.loss}; "
            f"work split into {self.partitions} partition{'s' * (self.partitions > 1)}"
            f"{', each with its rows of the batch in all layers' if self.by_rows else ''}"
            f"{' and a copy of the weights' if self.private_weights else ''}",
            f"arena {self.size / 2**20:.2f} MiB: parameters and optimizer state "
            f"{self.buffers['parameters'].size / 2**20:.2f} MiB, the rest activations, gradients and control",
            *map(self._line, self.stages),
            f"{when}; the next batch is gathered while this one finishes",
        ])  # fmt: skip

    def _line(self, stage: Stage) -> str:
        """A stage, for people: its layers in order, and how its products are divided."""
        what = "input" if stage.linear is None else f"linear {stage.linear.inputs} -> {stage.width}"
        steps = []
        for group in stage.groups:
            head = group.head
            steps += ["batch norm"] if group.batch_norm else ["layer norm"] if group.layer_norm else []
            steps += [f"plus stage {head.stage}"] if isinstance(head, Add) else []
            steps += [op.name if isinstance(op, Activation) else f"dropout {op.p:g}" for op in group.operations]
        how = ""
        if stage.linear and not self.by_rows:
            how = "; forward by batch rows" if self.forward_by_rows(stage) else "; forward by columns"
            how += ", dW by input rows" if stage is self.last else ", dW by columns"
        return f"stage {stage.index}: {what}{''.join(', ' + step for step in steps)}{how}"
