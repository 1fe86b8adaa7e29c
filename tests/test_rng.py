"""The random numbers of every engine: Philox against its published vectors, row orders, dropout masks."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from onelaunch.errors import OnelaunchError
from onelaunch.rng import MASK32, dropout_bits, dropout_keep, keep_threshold, permutation, philox

# Known answers of Random123 (kat_vectors, philox4x32 with 10 rounds).
KNOWN = [
    ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((MASK32,) * 4, 2**64 - 1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        0x299F31D0A4093822,
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "seed", "expected"), KNOWN)
def test_philox_gives_its_published_vectors(counter, seed, expected):
    assert philox(counter, seed) == expected
    words = philox(tuple(torch.tensor([word]) for word in counter), seed)
    assert tuple(int(word) for word in words) == expected


@given(n=st.integers(0, 5000), seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 2**40))
@settings(max_examples=60)
def test_permutation_visits_every_row_once(n, seed, epoch):
    order = permutation(n, seed, epoch)
    assert order.dtype == torch.int64
    assert torch.equal(order.sort().values, torch.arange(n))


def test_permutation_is_the_documented_function():
    """The definition at the top of rng.py, written again in plain integers for one row at a time."""

    def walk(index: int, n: int, seed: int, epoch: int) -> int:
        keys = [*philox((0, epoch, 0, MASK32), seed), *philox((1, epoch, 0, MASK32), seed)]
        bits = max(8, (n - 1).bit_length())
        while True:
            widths = [bits // 2, bits - bits // 2]
            left, right = index >> widths[1], index % (1 << widths[1])
            for key in keys:
                h = (right ^ key) * 0x85EBCA6B % 2**32
                h ^= h >> 13
                h = h * 0xC2B2AE35 % 2**32
                h ^= h >> 16
                left, right = right, left ^ (h % (1 << widths[0]))
                widths.reverse()
            index = left << widths[1] | right
            if index < n:
                return index

    for n, seed, epoch in ((1, 0, 0), (37, 5, 2), (300, 2**63 + 1, 7), (1000, 3, 0)):
        assert permutation(n, seed, epoch).tolist() == [walk(i, n, seed, epoch) for i in range(n)]


def test_permutation_never_changes():
    """Any later version must be able to reproduce a saved run."""
    assert permutation(10, 0, 0).tolist() == GOLDEN_ORDER
    assert permutation(10, 0, 1).tolist() != GOLDEN_ORDER
    assert permutation(10, 1, 0).tolist() != GOLDEN_ORDER


GOLDEN_ORDER = [2, 0, 5, 9, 4, 6, 3, 7, 8, 1]


def chi_square_bound(freedom: int) -> float:
    """Four standard deviations above the mean, which a fair draw exceeds at most once in ten thousand times."""
    return freedom + 4 * math.sqrt(2 * freedom)


def test_permutations_are_equally_likely():
    per_order = 20
    seen = Counter(tuple(permutation(4, 7, epoch).tolist()) for epoch in range(24 * per_order))
    chi = sum((seen[order] - per_order) ** 2 / per_order for order in itertools.permutations(range(4)))
    assert chi < chi_square_bound(23)


def test_permutation_prefers_no_position_or_neighbour():
    n, epochs = 37, 1000
    orders = torch.stack([permutation(n, 11, epoch) for epoch in range(epochs)])
    positions = torch.stack([torch.bincount(orders[:, i], minlength=n) for i in range(n)]).double()
    assert ((positions - epochs / n) ** 2 / (epochs / n)).sum() < chi_square_bound((n - 1) ** 2)
    gaps = torch.bincount(((orders[:, 1:] - orders[:, :-1]) % n).flatten(), minlength=n)[1:].double()
    assert ((gaps - gaps.mean()) ** 2 / gaps.mean()).sum() < chi_square_bound(n - 2)


@pytest.mark.gpu
def test_numbers_are_the_same_on_the_gpu():
    for n in (1, 255, 256, 257, 60000):
        assert torch.equal(permutation(n, 2**63 + 5, 3), permutation(n, 2**63 + 5, 3, device="cuda").cpu())
    bits = dropout_bits(2**63 + 5, 2, range(3, 7), 5, 19)
    assert torch.equal(bits, dropout_bits(2**63 + 5, 2, range(3, 7), 5, 19, device="cuda").cpu())


def test_dropout_bits_are_the_documented_function():
    seed, layer = 2**40 + 9, 3
    bits = dropout_bits(seed, layer, range(10, 12), rows=4, units=21)
    for step, row, unit in itertools.product(range(10, 12), range(4), range(21)):
        word = philox((unit // 8, row, step, layer), seed)[unit % 8 // 2]
        assert bits[step - 10, row, unit] == (word >> 16 if unit % 2 else word & 0xFFFF)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_dropout_keeps_the_fraction_1_minus_p(p):
    keep = dropout_keep(p, 5, 0, 0, 500, 800)
    sigma = math.sqrt(p * (1 - p) / keep.numel())
    assert abs(keep.double().mean().item() - (1 - p)) <= 4 * sigma + 1 / 65536


def test_dropout_masks_differ_in_every_coordinate():
    base = dropout_keep(0.5, 1, 1, 1, 8, 64)
    assert not torch.equal(base, dropout_keep(0.5, 2, 1, 1, 8, 64))
    assert not torch.equal(base, dropout_keep(0.5, 1, 2, 1, 8, 64))
    assert not torch.equal(base, dropout_keep(0.5, 1, 1, 2, 8, 64))
    assert len({tuple(row.tolist()) for row in base}) == 8
    assert keep_threshold(0.5) == 32768


@pytest.mark.parametrize(
    ("arguments", "named"),
    [((-1, 0, 0), "n=-1"), ((2.5, 0, 0), "n=2.5"), ((3, -1, 0), "seed=-1"), ((3, 0, -2), "epoch=-2")],
)
def test_bad_arguments_are_named(arguments, named):
    with pytest.raises(OnelaunchError, match=named):
        permutation(*arguments)
