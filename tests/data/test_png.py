"""Images as PNG: another program reads back the same pixels."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from onelaunch.data.png import as_image, encode_png


@pytest.mark.parametrize("shape", [(8, 8), (5, 7), (6, 4, 3), (1, 1)])
def test_the_pixels_come_back(shape: tuple[int, ...]) -> None:
    image = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    with Image.open(io.BytesIO(encode_png(image))) as opened:
        assert np.array_equal(np.asarray(opened), image)


def test_what_is_an_image() -> None:
    grey = np.arange(64, dtype=np.uint8).reshape(8, 8)
    assert np.array_equal(as_image(grey), grey)
    assert np.array_equal(as_image(grey[None]), grey)  # channels first
    assert np.array_equal(as_image(grey[:, :, None]), grey)
    assert np.array_equal(as_image(np.zeros((3, 8, 9), np.uint8)), np.zeros((8, 9, 3)))
    assert np.array_equal(as_image((grey / 255).astype(np.float32)), grey)
    for other in (grey.ravel(), grey.astype(np.float32), grey.astype(np.int64), np.zeros((2, 8, 8), np.uint8)):
        assert as_image(other) is None
