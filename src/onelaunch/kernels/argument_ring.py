"""The first and the last kernel of a recorded step: its arguments are read, and its loss is written, through addresses.

The host writes the addresses of a call's arguments and of its loss to a slot of a ring in pinned memory, and replays. So a
call needs no copy, no allocation and no other launch. A counter on the device says which slot is next.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from onelaunch.integers import ceil_div, next_power_of_2
from onelaunch.kernels.launch import launch

SLOTS = 1024
BLOCK = 1024  # words per turn of a program
MAX_PROGRAMS = 64  # per argument
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
WORD_TYPES = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}


@triton.jit
def read_slot_kernel(state_ptr, slots_ptr, WIDTH: tl.constexpr, SLOTS: tl.constexpr, LANES: tl.constexpr):
    """Copy the current slot to the device, in one transfer over the bus. `state`: the number of calls, then the slot."""
    lane = tl.arange(0, LANES)
    slot = tl.load(state_ptr) % SLOTS
    addresses = tl.load(
        slots_ptr + slot * WIDTH + lane, mask=lane < WIDTH, cache_modifier=".cv"
    )  # the host writes there
    tl.store(state_ptr + 1 + lane, addresses, mask=lane < WIDTH)


@triton.jit
def copy_arguments_kernel(state_ptr, targets_ptr, WORD: tl.constexpr, BLOCK: tl.constexpr):
    """Copy every argument to its target; `targets`: (address, words) per argument. Programs are (turns, arguments)."""
    column = tl.program_id(1)
    source_ptr = tl.load(state_ptr + 1 + column).to(tl.pointer_type(WORD))
    target_ptr = tl.load(targets_ptr + column * 2).to(tl.pointer_type(WORD))
    n = tl.load(targets_ptr + column * 2 + 1)
    for begin in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        word = begin + tl.arange(0, BLOCK)
        tl.store(target_ptr + word, tl.load(source_ptr + word, mask=word < n), mask=word < n)


@triton.jit
def write_loss_kernel(loss_ptr, state_ptr, WIDTH: tl.constexpr):
    """Write the loss to the slot's last address, and count the call."""
    address = tl.load(state_ptr + WIDTH)
    tl.store(address.to(tl.pointer_type(loss_ptr.dtype.element_ty)), tl.load(loss_ptr))
    tl.store(state_ptr, tl.load(state_ptr) + 1)


def targets_of(inputs: Sequence[torch.Tensor]) -> tuple[list[tuple[int, int]], int]:
    """((address, number of words) per contiguous tensor, bytes per word): the largest word that fits every tensor's type."""
    size = min((one.element_size() for one in inputs), default=8)
    return [(one.data_ptr(), one.numel() * one.element_size() // size) for one in inputs], size


def copy_arguments(
    slots: torch.Tensor, state: torch.Tensor, targets: torch.Tensor, word_bytes: int, words: int
) -> None:
    """Fill the targets from the addresses in the slot that `state` names; `words` is the largest target's number of words.

    slots: int64 (SLOTS, arguments + 1), in pinned memory; state: int64 (arguments + 2,) and targets: int64 (arguments, 2), both
    on the device.
    """
    width = slots.shape[1]
    launch(read_slot_kernel, (1,), (state, slots), (), (), (width, SLOTS, next_power_of_2(width)), num_warps=1)
    grid = (max(1, min(MAX_PROGRAMS, ceil_div(words, BLOCK))), width - 1)
    launch(copy_arguments_kernel, grid, (state, targets), (), (), (WORD_TYPES[word_bytes], BLOCK), num_warps=4)


def write_loss(loss: torch.Tensor, state: torch.Tensor) -> None:
    """Write the 0-d `loss` to the last address that `copy_arguments` left in `state`, then count the call."""
    launch(write_loss_kernel, (1,), (loss, state), (), (), (state.numel() - 1,), num_warps=1)
