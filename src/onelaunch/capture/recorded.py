"""A recorded training step and how it gets a call's arguments and returns its loss.

Copying two arguments, cloning the loss and allocating memory for it cost the host 45 µs per call, several times what the device
needs for a small network. A recording with small arguments therefore reads them through addresses (`ArgumentRing`): a call
writes a few integers and replays. Large arguments are copied, where the host's time does not count.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from onelaunch.capture.dependencies import Dependencies
from onelaunch.kernels.argument_ring import SLOTS, WORDS, copy_arguments, targets_of, write_loss

MAX_RING_BYTES = 2**18  # per argument: above, a copy by the driver is faster than one by a few programs
HALF = SLOTS // 2
LOSSES = 1024  # allocated at once; a loss that is kept keeps these 4 kB


class ArgumentRing:
    """Slots in pinned memory, each with the addresses of one call's arguments and of its loss."""

    def __init__(self, inputs: Sequence[torch.Tensor], device: torch.device) -> None:
        self.inputs, self.device = list(inputs), device
        self.width = len(inputs) + 1
        self.slots = torch.zeros(SLOTS, self.width, dtype=torch.int64, device="cpu", pin_memory=True)
        self.state = torch.zeros(self.width + 1, dtype=torch.int64, device=device)  # calls so far, then a slot
        targets, self.word_bytes = targets_of(self.inputs)
        self.targets = torch.tensor(targets, device=device)
        self.words = max(words for _, words in targets)
        self._kinds = [(one.shape, one.dtype) for one in inputs]
        self._index = device.index if device.index is not None else torch.cuda.current_device()
        self._cells = memoryview(self.slots.numpy().reshape(-1))  # type: ignore[arg-type]
        self.calls = 0
        self.on_half: Callable[[], None] = _nothing  # called after every half of the slots
        self._done = [torch.cuda.Event(), torch.cuda.Event()]  # all replays that read one half of the slots
        self._losses: tuple[torch.Tensor, ...] = ()
        self._loss_address = self._loss_bytes = 0
        self._next_loss = 0
        self._stream = -1
        # Replays under way read the slots, which the next owner of that memory would overwrite.
        weakref.finalize(self, torch.cuda.synchronize, self._index).atexit = False

    def read_arguments(self) -> None:
        """The first launches of a recording."""
        copy_arguments(self.slots, self.state, self.targets, self.word_bytes, self.words)

    def write_loss(self, loss: torch.Tensor) -> None:
        """The last launch of a recording."""
        self._dtype = loss.dtype
        write_loss(loss, self.state)

    def takes(self, args: Sequence[Any]) -> bool:
        """Whether these arguments can be read in place: types, shapes and device as recorded, and contiguous."""
        if len(args) != len(self._kinds):
            return False
        before: tuple[Any, ...] = ()
        for given, (shape, dtype) in zip(args, self._kinds, strict=True):
            if type(given) is not torch.Tensor or given.dtype is not dtype or given.shape != shape:
                return False
            if given.get_device() != self._index or not given.is_contiguous():
                return False
            for other in before:  # one tensor as two arguments is another recording
                if other is given:
                    return False
            before = (*before, given)
        return True

    def send(self, args: Sequence[torch.Tensor]) -> torch.Tensor:
        """Fill the next slot; the tensor that will hold the call's loss. The caller replays the recording next."""
        slot = self.calls % SLOTS
        if slot % HALF == 0:
            self._enter_half(slot // HALF)
        if self._next_loss == len(self._losses) or torch._C._cuda_getCurrentRawStream(self._index) != self._stream:
            self._allocate_losses()
        cells, cell = self._cells, slot * self.width
        for given in args:
            cells[cell] = given.data_ptr()
            cell += 1
        index = self._next_loss
        cells[cell] = self._loss_address + index * self._loss_bytes
        self.calls += 1
        self._next_loss = index + 1
        return self._losses[index]

    def resume(self) -> None:
        """Continue at the slot that the device reads next, after a call that was interrupted."""
        self.calls = int(self.state[0])

    def _enter_half(self, half: int) -> None:
        """The other half has been sent; this half is free once its last replay has ended."""
        self.on_half()
        self._done[1 - half].record()
        self._done[half].synchronize()

    def _allocate_losses(self) -> None:
        self._stream = torch._C._cuda_getCurrentRawStream(self._index)
        losses = torch.empty(LOSSES, dtype=self._dtype, device=self.device)
        self._losses, self._next_loss = losses.unbind(), 0
        self._loss_address, self._loss_bytes = losses.data_ptr(), losses.element_size()


def _nothing() -> None:
    pass


class Recorded:
    """A recorded step: its graph, the memory it reads, and the loss it writes."""

    def __init__(self, inputs: list[torch.Tensor], device: torch.device, dependencies: Dependencies) -> None:
        self.graph = torch.cuda.CUDAGraph()
        self.inputs, self.dependencies = inputs, dependencies
        self.memory: list[object] = []  # the optimizer's tables and state: the recording writes to it
        self.loss = torch.empty(())
        self._copied = 0  # replays whose inputs were copied
        fits = all(one.numel() * one.element_size() <= MAX_RING_BYTES and one.element_size() in WORDS for one in inputs)
        plain = all(one.is_contiguous() and not one.is_complex() for one in inputs)  # a conjugate is a note on a tensor
        self.ring = ArgumentRing(inputs, device) if inputs and fits and plain else None

    @property
    def replays(self) -> int:
        return self._copied if self.ring is None else self.ring.calls

    def begin(self) -> None:
        """What comes first in the recording."""
        if self.ring is not None:
            self.ring.read_arguments()

    def end(self, loss: torch.Tensor) -> None:
        """What comes last."""
        self.loss = loss
        if self.ring is not None:
            self.ring.write_loss(loss)

    def replay(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Train on these tensors, which have the recorded shapes and types; the loss as a 0-d tensor of its own."""
        if self.ring is None:
            with torch.no_grad():
                for static, given in zip(self.inputs, tensors, strict=True):
                    static.copy_(given, non_blocking=True)
            self.graph.replay()
            self._copied += 1
            return self.loss.clone()
        if not self.ring.takes(tensors):
            tensors = [given.detach().to(self.ring.device).contiguous() for given in tensors]
        return self.replay_in_place(self.ring, tensors)

    def replay_in_place(self, ring: ArgumentRing, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Train on these tensors, which its ring takes."""
        try:
            loss = ring.send(tensors)
            self.graph.replay()
        except BaseException:  # Ctrl-C between a slot and its replay
            ring.resume()
            raise
        return loss
