"""Images as PNG files, from arrays, with the standard library alone."""

from __future__ import annotations

import struct
import zlib

import numpy as np


def as_image(row: np.ndarray) -> np.ndarray | None:
    """A row of bytes, or of floats from 0 to 1, as a uint8 image, [height, width] or [height, width, 3]; None for a row that
    is no image."""
    if row.dtype == np.float32 and row.ndim > 1 and row.min() >= 0 and row.max() <= 1:
        row = (255 * row).round().astype(np.uint8)
    if row.dtype != np.uint8 or row.ndim not in (2, 3):
        return None
    if row.ndim == 3 and row.shape[0] in (1, 3) and row.shape[2] not in (1, 3):
        row = row.transpose(1, 2, 0)  # channels first
    if row.ndim == 3 and row.shape[2] == 1:
        row = row[:, :, 0]
    return row if row.ndim == 2 or row.shape[2] == 3 else None


def encode_png(image: np.ndarray) -> bytes:
    """The PNG file of a uint8 image, [height, width] for grey or [height, width, 3] for colours."""
    height, width = image.shape[:2]
    colours = 2 if image.ndim == 3 else 0
    lines = np.zeros((height, 1 + image[0].size), np.uint8)  # each line begins with its filter: none
    lines[:, 1:] = image.reshape(height, -1)

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, colours, 0, 0, 0)
    body = zlib.compress(lines.tobytes(), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")
