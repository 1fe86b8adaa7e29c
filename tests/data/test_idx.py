"""IDX files: round trips, and one line for every deviation from the format."""

from __future__ import annotations

import gzip
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from onelaunch.data.idx import read_idx
from onelaunch.errors import DataError
from tests.data.idx_files import idx_bytes

IMAGES = np.random.default_rng(0).integers(0, 256, (5, 4, 3), np.uint8)
LABELS = np.arange(7, dtype=np.uint8)
ANY = (None, None, None)
property_test = settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])


def write(tmp_path: Path, content: bytes, name: str = "file") -> Path:
    path = tmp_path / name
    path.write_bytes(content)
    return path


def refused(path: Path, match: str, shape: tuple[int | None, ...] = ANY) -> None:
    with pytest.raises(DataError, match=match) as caught:
        read_idx(path, shape)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(str(path)), "the file is named"
    assert "fresh copy" in message or "check its permissions" in message, "the remedy is named"


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("values", "shape"), [(IMAGES, ANY), (IMAGES, (5, 4, 3)), (LABELS, (None,))])
def test_round_trip(tmp_path: Path, values: np.ndarray, shape: tuple[int | None, ...], packed: bool) -> None:
    content = idx_bytes(values)
    got = read_idx(write(tmp_path, gzip.compress(content) if packed else content), shape)
    assert got.dtype == np.uint8
    np.testing.assert_array_equal(got, values)
    assert got.flags.writeable
    assert got.flags.c_contiguous


def test_gzip_is_recognised_by_its_content(tmp_path: Path) -> None:
    np.testing.assert_array_equal(read_idx(write(tmp_path, idx_bytes(IMAGES), "images.gz"), ANY), IMAGES)
    np.testing.assert_array_equal(read_idx(write(tmp_path, gzip.compress(idx_bytes(IMAGES)), "images"), ANY), IMAGES)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "truncated inside its 16-byte header"),
        (idx_bytes(IMAGES)[:3], "truncated inside its 16-byte header"),
        (idx_bytes(IMAGES)[:15], "truncated inside its 16-byte header"),
        (b"<html>404 Not Found</html>", r"not an IDX file \(magic number 1013478509, expected 2051\)"),
        (idx_bytes(IMAGES, kind=0x0D), "type 0x0d, expected unsigned bytes"),
        (idx_bytes(LABELS), r"1 dimensions, expected 3 \(magic number 2049, expected 2051\)"),
        (idx_bytes(IMAGES[:0]), "holds no values"),
        (idx_bytes(IMAGES)[:-1], "truncated: its header promises 60 values, the file holds 59"),
        (idx_bytes(IMAGES) + b"\0", "oversized: more than the 60 values"),
        (struct.pack(">4I", 2051, 2**32 - 1, 2**32 - 1, 2**32 - 1), "truncated: its header promises"),
        (gzip.compress(idx_bytes(IMAGES)[:-1]), "truncated: its header promises 60 values, it holds 59"),
        (gzip.compress(idx_bytes(IMAGES) + b"\0"), "oversized"),
        (gzip.compress(idx_bytes(IMAGES))[:-9], "gzip stream ends too early"),
        (gzip.compress(idx_bytes(IMAGES))[:-4] + b"\1\1\1\1", "gzip stream is damaged"),
        (gzip.compress(idx_bytes(IMAGES))[:-8] + b"\0\0\0\0" + b"\x4c\0\0\0", r"damaged \(CRC check failed"),
        (gzip.compress(idx_bytes(IMAGES)) + b"junk", "gzip stream is damaged"),
        (b"\x1f\x8b", "gzip stream ends too early"),
        (b"\x1f\x8b" + b"\xff" * 30, "gzip stream is damaged"),
    ],
    ids=lambda value: (
        value if isinstance(value, str) else "file"
    ),  # a gzip stream holds a time stamp, so it cannot name a test
)
def test_refused(tmp_path: Path, content: bytes, match: str) -> None:
    refused(write(tmp_path, content), match)


def test_wrong_shape_missing_file_and_folder(tmp_path: Path) -> None:
    refused(write(tmp_path, idx_bytes(IMAGES)), "says 5×4×3, expected n×28×28", (None, 28, 28))
    refused(tmp_path / "absent", "no such file")
    refused(tmp_path, "cannot be read")


def test_neither_a_header_nor_a_gzip_bomb_takes_memory(tmp_path: Path) -> None:
    promise = write(tmp_path, struct.pack(">4I", 2051, 60_000, 28, 28) + bytes(100), "promise")
    packed_promise = write(tmp_path, gzip.compress(promise.read_bytes()), "promise.gz")
    bomb = write(tmp_path, gzip.compress(idx_bytes(IMAGES) + bytes(20_000_000)), "bomb.gz")
    tracemalloc.start()
    try:
        refused(promise, "truncated")
        refused(packed_promise, "far too small")
        refused(bomb, "oversized")
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


def parsed_or_refused_in_one_line(path: Path) -> np.ndarray | None:
    try:
        return read_idx(path, ANY)
    except DataError as error:
        message = str(error)
    assert "\n" not in message
    return None


def parsed_the_same_or_refused(path: Path, values: np.ndarray) -> None:
    got = parsed_or_refused_in_one_line(path)
    np.testing.assert_array_equal(values if got is None else got, values)


@property_test
@given(length=st.integers(0, 75))
def test_every_truncation_is_refused(tmp_path: Path, length: int) -> None:
    refused(write(tmp_path, idx_bytes(IMAGES)[:length]), "truncated")


@property_test
@given(extra=st.binary(min_size=1, max_size=50))
def test_every_extension_is_refused(tmp_path: Path, extra: bytes) -> None:
    refused(write(tmp_path, idx_bytes(IMAGES) + extra), "oversized")
    refused(write(tmp_path, gzip.compress(idx_bytes(IMAGES) + extra)), "oversized")


@property_test
@given(position=st.integers(0, 15), flip=st.integers(1, 255))
def test_every_change_of_the_header_is_refused(tmp_path: Path, position: int, flip: int) -> None:
    content = bytearray(idx_bytes(IMAGES))
    content[position] ^= flip
    refused(write(tmp_path, bytes(content)), "magic number|promises|holds no values")


@property_test
@given(data=st.data())
def test_damaged_gzip_is_refused_or_parsed_the_same(tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(gzip.compress(idx_bytes(IMAGES), mtime=0))
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    parsed_the_same_or_refused(write(tmp_path, bytes(content)), IMAGES)
    del content[data.draw(st.integers(0, len(content) - 1)) :]
    parsed_the_same_or_refused(write(tmp_path, bytes(content)), IMAGES)


@property_test
@given(content=st.binary(max_size=200))
def test_any_bytes_are_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    for prefix in (b"", b"\x1f\x8b\x08\0", b"\0\0\x08\3"):
        parsed_or_refused_in_one_line(write(tmp_path, prefix + content))


@property_test
@given(shape=st.lists(st.integers(1, 6), min_size=1, max_size=4), packed=st.booleans())
def test_any_shape_round_trips(tmp_path: Path, shape: list[int], packed: bool) -> None:
    values = np.random.default_rng(1).integers(0, 256, shape, np.uint8)
    content = idx_bytes(values)
    path = write(tmp_path, gzip.compress(content) if packed else content)
    np.testing.assert_array_equal(read_idx(path, (None,) * len(shape)), values)
