"""Integer arithmetic that plans and launchers share."""

from __future__ import annotations


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up, for a >= 0 and b > 0."""
    return -(-a // b)


def round_up(a: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `a`."""
    return -(-a // multiple) * multiple


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least `n`; 1 for n < 2."""
    return 1 << (n - 1).bit_length() if n > 1 else 1


def clamp(low: int, value: int, high: int) -> int:
    """`value` limited to [low, high]."""
    return max(low, min(value, high))
