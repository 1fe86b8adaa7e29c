"""Numbers between host and device while the device works on: nothing here waits but `wait`."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


def upload(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy a CPU tensor over; PyTorch keeps the page-locked copy until the device has read it."""
    if target.is_cuda:
        source = source.pin_memory()
    target.copy_(source, non_blocking=True)


def download(source: torch.Tensor) -> torch.Tensor:
    """A CPU tensor that holds what `source` holds now, once the device has come this far."""
    return source.to("cpu", non_blocking=True, copy=True)


class _Mark:
    """A moment in the device's work."""

    def __init__(self) -> None:
        self._event: torch.cuda.Event | None = None

    def set(self, device: torch.device) -> None:
        if device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()


class Look:
    """The loss of a step and the right predictions up to it, on their way to the host."""

    def __init__(self, step: int, done: int, loss: torch.Tensor, control: torch.Tensor) -> None:
        """`done` steps were queued since the last look."""
        self.step, self.done = step, done
        self._loss, self._control, self._mark = download(loss), download(control), _Mark()
        self._mark.set(loss.device)

    def wait(self) -> tuple[float, int]:
        self._mark.wait()
        return float(self._loss), int(self._control[2])


@dataclass
class Pending:
    """The results of steps `[first_step, end)`, on their way to the host; complete once `close` and then `wait` were called."""

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
        """Everything is queued."""
        self._mark.set(self._device)

    def wait(self) -> None:
        self._mark.wait()
