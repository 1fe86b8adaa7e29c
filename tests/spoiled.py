"""Damage to the entries of a code cache that its header with a checksum must detect."""

from __future__ import annotations

from pathlib import Path

DAMAGES = ("truncated", "flipped", "emptied", "foreign key")


def spoil(entry: Path, damage: str) -> None:
    """Overwrite the file `entry` with a damaged copy; `damage` is one of DAMAGES."""
    content = entry.read_bytes()
    spoiled = {
        "truncated": content[: len(content) // 2],
        "flipped": content[:-100] + bytes([content[-100] ^ 1]) + content[-99:],
        "emptied": b"",
        "foreign key": content.replace(entry.stem.encode(), b"0" * 64, 1),
    }
    entry.write_bytes(spoiled[damage])
