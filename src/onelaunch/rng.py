"""The random numbers of a run: counter-based, so that every engine and device draws the same ones.

Nothing here has state. A number is a function of the seed and of *its purpose*: the row order of an epoch, or the dropout
bits of one unit of one row at one step. An engine may compute any of them at any time, in any order, in any tile.

Row order. `permutation(n, seed, epoch)[i] = walk(i)`, a bijection on `[0, n)` that needs no sort and no memory:
  * an eight-round Feistel network over `k = max(8, bits(n - 1))` bits: a left word of `k // 2` bits, a right word of the rest;
    a round maps (L, R) to (R, L ^ F(R, key)), F truncated to L's width, so the widths are exchanged every round;
  * `F(r, key)`: h = r ^ key;  h *= 0x85EBCA6B;  h ^= h >> 13;  h *= 0xC2B2AE35;  h ^= h >> 16   (all modulo 2**32);
  * the eight keys are the words of Philox(counter = (0 and 1, epoch, epoch >> 32, 0xFFFFFFFF), key = seed);
  * a result of n or more passes through the network again until it is below n (fewer than two passes on average for
    n > 128).

Dropout. Unit u of row r (its index in the batch) at step s in dropout layer l is kept when
`bits16(seed, l, s, r, u) < round((1 - p) * 65536)`, and is then scaled by 1 / (1 - p). The bits are those of
Philox(counter = (u // 8, r, s, l), key = seed), whose four words serve eight units: unit 2i of a group takes the low 16 bits
of word i, unit 2i + 1 its high 16 bits (the order of eight uint16 in memory on a little-endian machine).

Philox is Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011); the key is the seed's low
and high word.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from onelaunch.errors import OnelaunchError, require_integer
from onelaunch.integers import ceil_div

MASK32 = 0xFFFFFFFF
PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
FEISTEL_ROUNDS = 8
FEISTEL_MULTIPLIERS = (0x85EBCA6B, 0xC2B2AE35)
PERMUTATION_STREAM = MASK32  # the last counter word of the row order; dropout layers count up from 0
UNITS_PER_CALL = 8
MAX_TABLE_BITS = 12
PIECE = 2**18  # entries of a row order that are computed at once

Word = torch.Tensor | int


def check_seed(seed: object) -> int:
    return _whole_number("seed", seed, 2**64)


def _whole_number(argument: str, value: object, bound: int) -> int:
    number = require_integer(argument, value, "a whole number, 0 or more")
    if not 0 <= number < bound:
        limit = f"2**{bound.bit_length() - 1} - 1"
        raise OnelaunchError(f"{argument}={number} is out of range: pass an integer from 0 to {limit}")
    return number


def _multiply(word: Word, factor: int) -> tuple[Word, Word]:
    """High and low 32 bits of a 32 x 32 bit product, both in int64 (whose product wraps, but keeps the correct bits)."""
    product = word * factor
    return (product >> 32) & MASK32, product & MASK32


def philox(counter: tuple[Word, Word, Word, Word], seed: int) -> tuple[Word, Word, Word, Word]:
    """Philox4x32-10 of 32-bit words, given as ints or as int64 tensors that broadcast together."""
    c0, c1, c2, c3 = counter
    key0, key1 = seed & MASK32, seed >> 32
    for _ in range(10):
        high0, low0 = _multiply(c0, PHILOX_MULTIPLIERS[0])
        high1, low1 = _multiply(c2, PHILOX_MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
        key0, key1 = (key0 + PHILOX_KEY_STEPS[0]) & MASK32, (key1 + PHILOX_KEY_STEPS[1]) & MASK32
    return c0, c1, c2, c3


def permutation_bits(n: int) -> int:
    """Width in bits of the Feistel network for n rows; at least eight, since narrower words mix badly."""
    return max(8, (n - 1).bit_length())


def permutation_keys(seed: int, epoch: int) -> list[int]:
    """The eight round keys of an epoch's row order."""
    words: list[int] = []
    for call in range(2):
        for word in philox((call, epoch & MASK32, epoch >> 32, PERMUTATION_STREAM), seed):
            assert isinstance(word, int)
            words.append(word)
    return words


def _feistel(index: torch.Tensor, keys: list[int], bits: int) -> torch.Tensor:
    left_bits, right_bits = bits // 2, bits - bits // 2
    left, right = index >> right_bits, index & ((1 << right_bits) - 1)
    for key in keys:
        mixed = ((right ^ key) * FEISTEL_MULTIPLIERS[0]) & MASK32
        mixed = mixed ^ (mixed >> 13)
        mixed = (mixed * FEISTEL_MULTIPLIERS[1]) & MASK32
        mixed = (mixed ^ (mixed >> 16)) & ((1 << left_bits) - 1)
        left, right = right, left ^ mixed
        left_bits, right_bits = right_bits, left_bits
    return (left << right_bits) | right


def permutation(n: int, seed: int, epoch: int, *, device: torch.device | str | None = None) -> torch.Tensor:
    """The order in which epoch `epoch` (counted from 0) of a run with this seed visits its n rows, as int64 `[n]`.

    The numbers are the same on every device and in every engine. Batch b of an epoch is
    `x[permutation(n, seed, epoch)[b * batch_size : (b + 1) * batch_size]]`.
    """
    n, epoch = _whole_number("n", n, 2**62), _whole_number("epoch", epoch, 2**62)
    keys, bits = permutation_keys(check_seed(seed), epoch), permutation_bits(n)
    if bits > MAX_TABLE_BITS:
        order = torch.empty(n, dtype=torch.int64, device=device)
        for first in range(0, n, PIECE):  # the temporaries of a piece are small, and a CPU keeps them in its cache
            _walk(first, order[first : first + PIECE], n, keys, bits)
        return order
    # The whole network is a table, and each further pass is one look-up.
    table = _feistel(torch.arange(1 << bits, dtype=torch.int64, device=device), keys, bits)
    order = table[:n].clone()
    outside = torch.nonzero(order >= n).flatten()
    while outside.numel():
        order[outside] = walked = table[order[outside]]
        outside = outside[walked >= n]
    return order


def _walk(first: int, out: torch.Tensor, n: int, keys: list[int], bits: int) -> None:
    """Fill `out` with the entries of a permutation of n rows from entry `first` on."""
    if out.device.type == "cpu" and bits <= 32:  # NumPy: 32-bit words, and no thread that a busy machine would wait for
        words = _feistel_32(np.arange(first, first + len(out), dtype=np.uint32), keys, bits)
        outside = np.flatnonzero(words >= n)
        while len(outside):
            words[outside] = walked = _feistel_32(words[outside], keys, bits)
            outside = outside[walked >= n]
        out.numpy()[:] = words
        return
    out.copy_(_feistel(torch.arange(first, first + len(out), dtype=torch.int64, device=out.device), keys, bits))
    left = torch.nonzero(out >= n).flatten()
    while left.numel():
        out[left] = further = _feistel(out[left], keys, bits)
        left = left[further >= n]


def _feistel_32(index: np.ndarray[Any, Any], keys: list[int], bits: int) -> np.ndarray[Any, Any]:
    """`_feistel` of uint32, whose products wrap by themselves."""
    left_bits, right_bits = bits // 2, bits - bits // 2
    left, right = index >> np.uint32(right_bits), index & np.uint32((1 << right_bits) - 1)
    for key in keys:
        mixed = right ^ np.uint32(key)
        mixed *= np.uint32(FEISTEL_MULTIPLIERS[0])
        mixed ^= mixed >> np.uint32(13)
        mixed *= np.uint32(FEISTEL_MULTIPLIERS[1])
        mixed ^= mixed >> np.uint32(16)
        mixed &= np.uint32((1 << left_bits) - 1)
        mixed ^= left
        left, right = right, mixed
        left_bits, right_bits = right_bits, left_bits
    return (left << np.uint32(right_bits)) | right


def signed_seed(seed: int) -> int:
    """The signed 64-bit integer with the bits of `seed`, as kernels and native code take it."""
    return seed - 2**64 if seed >= 2**63 else seed


def keep_threshold(p: float) -> int:
    """A unit is kept when its 16 bits are below this number, so that p is exact to 1/65536."""
    return round((1 - p) * 65536)


def keep_scale(p: float) -> float:
    """The factor of a kept unit."""
    return 0.0 if p == 1 else 1 / (1 - p)


def dropout_bits(
    seed: int, layer: int, steps: range | torch.Tensor, rows: int, units: int, *,
    device: torch.device | str | None = None,
) -> torch.Tensor:  # fmt: skip
    """The 16 random bits of every unit, as int32 `[len(steps), rows, units]`; `steps` may be an int64 vector on the device."""
    groups = ceil_div(units, UNITS_PER_CALL)
    group = torch.arange(groups, dtype=torch.int64, device=device)
    row = torch.arange(rows, dtype=torch.int64, device=device)[:, None]
    if isinstance(steps, range):
        steps = torch.arange(steps.start, steps.stop, dtype=torch.int64, device=device)
    step = steps[:, None, None]
    words = philox((group, row, step, layer), seed)
    bits_16: list[torch.Tensor] = []
    for word in words:
        assert isinstance(word, torch.Tensor)
        bits_16 += [(word & 0xFFFF).to(torch.int32), (word >> 16).to(torch.int32)]
    bits = torch.stack(bits_16, dim=-1).expand(len(steps), rows, groups, UNITS_PER_CALL)
    return bits.reshape(len(steps), rows, groups * UNITS_PER_CALL)[..., :units]


def dropout_keep(
    p: float, seed: int, layer: int, step: int, rows: int, units: int, *, device: torch.device | str | None = None
) -> torch.Tensor:
    """The boolean keep mask `[rows, units]` of dropout layer `layer` at step `step`."""
    return dropout_bits(seed, layer, range(step, step + 1), rows, units, device=device)[0] < keep_threshold(p)


def numpy_random_state() -> bytes:
    """The state of NumPy's global generator, which we never use: it shows whether a user's module has drawn from it."""
    state: Any = np.random.get_state()  # noqa: NPY002
    return state[1].tobytes() + str(state[2:]).encode()
