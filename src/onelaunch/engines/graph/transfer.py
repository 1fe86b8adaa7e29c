"""Asynchronous copies between host and device: nothing here blocks except `wait`."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from onelaunch.engines.graph.kernels.run_arguments import CONTROL


def upload(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies a CPU tensor to `target`; PyTorch keeps the page-locked copy alive until the device has read it."""
    if target.is_cuda:
        source = source.pin_memory()
    target.copy_(source, non_blocking=True)


def download(source: torch.Tensor) -> torch.Tensor:
    """A CPU tensor with the current contents of `source`, valid once the device has finished the work queued so far."""
    return source.to("cpu", non_blocking=True, copy=True)


def correct_predictions(control: torch.Tensor) -> int:
    """The number of correct predictions in a downloaded `control`."""
    return int(control[CONTROL.index("correct")])


class _Mark:
    """A point in the device's work; on the CPU, which has done its work already, nothing."""

    def __init__(self) -> None:
        self._event: torch.cuda.Event | None = None

    def set(self, device: torch.device) -> None:
        if device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()


class Progress:
    """The loss of a step and the number of correct predictions up to it, being copied to the host."""

    def __init__(self, step: int, queued: int, loss: torch.Tensor, control: torch.Tensor) -> None:
        """`queued` steps were queued since the previous Progress."""
        self.step, self.queued = step, queued
        self._loss, self._control, self._mark = download(loss), download(control), _Mark()
        self._mark.set(loss.device)

    def wait(self) -> tuple[float, int]:
        self._mark.wait()
        return float(self._loss), correct_predictions(self._control)


@dataclass
class Pending:
    """The results of steps `[first_step, end)`, being copied to the host: complete after `close` and then `wait`."""

    first_step: int
    end: int
    losses: torch.Tensor
    control: torch.Tensor
    validation: tuple[torch.Tensor, torch.Tensor] | None = None
    _mark: _Mark = field(default_factory=_Mark)

    def __post_init__(self) -> None:
        self._device = self.losses.device
        self.losses, self.control = download(self.losses), download(self.control)

    def close(self) -> None:
        """All copies are queued."""
        self._mark.set(self._device)

    def wait(self) -> None:
        self._mark.wait()
