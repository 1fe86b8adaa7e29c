"""Reads the IDX files of MNIST and its relatives, gzipped or plain, and refuses files that deviate from the format.

The format: two zero bytes, a type byte (8: unsigned bytes, the only type these sets use), the number of dimensions,
each dimension as a big-endian 32-bit number, then the values, row after row, and nothing after them.

The header is not trusted: the size it promises is compared with the file size before anything is allocated, and a gzip
stream is unpacked to at most one byte more than that promise.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import BinaryIO

import numpy as np

from onelaunch.errors import DataError

UNSIGNED_BYTES = 0x08
GZIP_MAGIC = b"\x1f\x8b"
DEFLATE_LIMIT = 1032  # deflate cannot pack more than 1032 bytes into one (zlib's technical notes)
REMEDY = "replace it with a fresh copy of the published file"


def read_idx(path: Path, shape: tuple[int | None, ...]) -> np.ndarray:
    """The array of unsigned bytes in `path`, which must have this shape; None stands for any size."""
    try:
        with path.open("rb") as file:
            packed = file.read(2) == GZIP_MAGIC
            file.seek(0, 2)
            file_size = file.tell()
            file.seek(0)
            if packed:
                with gzip.GzipFile(fileobj=file) as stream:
                    return _read(stream, path, shape, file_size * DEFLATE_LIMIT, packed)  # type: ignore[arg-type]
            return _read(file, path, shape, file_size, packed)
    except EOFError:
        raise DataError(f"{path}: the gzip stream ends too early (a partial download?): {REMEDY}") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: the gzip stream is damaged ({error}): {REMEDY}") from None
    except FileNotFoundError:
        raise DataError(f"{path}: no such file: {REMEDY}") from None
    except MemoryError:
        raise DataError(f"{path}: holds more than fits into memory: {REMEDY}") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error}): check its permissions") from None


def _read(file: BinaryIO, path: Path, shape: tuple[int | None, ...], max_size: int, packed: bool) -> np.ndarray:
    header_size = 4 + 4 * len(shape)
    header = file.read(header_size)
    expected_magic = UNSIGNED_BYTES << 8 | len(shape)
    if len(header) >= 4 and (magic := struct.unpack(">I", header[:4])[0]) != expected_magic:
        raise DataError(f"{path}: {_describe_magic(magic, expected_magic)}: {REMEDY}")
    if len(header) < header_size:
        raise DataError(f"{path}: is truncated inside its {header_size}-byte header ({len(header)} bytes): {REMEDY}")

    sizes = struct.unpack(f">{len(shape)}I", header[4:])
    got, expected = _join(sizes), _join(["n" if size is None else size for size in shape])
    if any(size is not None and size != found for size, found in zip(shape, sizes, strict=True)):
        raise DataError(f"{path}: its header says {got}, expected {expected}: {REMEDY}")
    promised = math.prod(sizes)
    if promised == 0:
        raise DataError(f"{path}: holds no values (its header says {got}): {REMEDY}")
    if header_size + promised > max_size:
        held = "the file is far too small for that" if packed else f"the file holds {max_size - header_size:,}"
        raise DataError(f"{path}: is truncated: its header promises {promised:,} values, {held}: {REMEDY}")

    values = file.read(promised + 1)  # one more byte reveals trailing data and makes gzip check its CRC at the end
    if len(values) < promised:
        raise DataError(
            f"{path}: is truncated: its header promises {promised:,} values, it holds {len(values):,}: {REMEDY}"
        )
    if len(values) > promised:
        raise DataError(f"{path}: is oversized: more than the {promised:,} values its header promises: {REMEDY}")
    return np.frombuffer(values, np.uint8).reshape(sizes).copy()  # a copy, because torch warns about read-only arrays


def _describe_magic(magic: int, expected: int) -> str:
    zeros, kind, dimensions = magic >> 16, magic >> 8 & 0xFF, magic & 0xFF
    if zeros:
        return f"is not an IDX file (magic number {magic}, expected {expected})"
    if kind != UNSIGNED_BYTES:
        return f"holds values of type 0x{kind:02x}, expected unsigned bytes (magic number {magic}, expected {expected})"
    return f"has {dimensions} dimensions, expected {expected & 0xFF} (magic number {magic}, expected {expected})"


def _join(sizes: tuple[int, ...] | list[int | str]) -> str:
    return "×".join(str(size) for size in sizes)
