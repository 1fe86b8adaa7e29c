"""Downloads one published file into a cache folder: checked, atomic, and quick to give up on a machine that is offline.

pooch downloads to a temporary name, compares the checksum and renames. A file under its final name is therefore complete,
and two processes may download the same file at once. No socket timeout catches a name server that never answers, or a server
that sends one byte per second. So the transfer runs in a thread, and the caller stops waiting when too little arrives.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from onelaunch.errors import DataError
from onelaunch.loggers import logging_from

ANSWER_SECONDS = 4.0  # to resolve the name, connect and receive the first CHUNK
STALL_SECONDS = 15.0  # for each further CHUNK
CHUNK = 8192
MAX_BYTES = 64 << 20  # the largest published file has 26 MB; a server that sends more than this is not the right one


def has_checksum(path: Path, md5: str) -> bool:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest() == md5
    except OSError:
        return False


def download(url: str, path: Path, md5: str) -> None:
    """Download `url` to `path`, in one try. A DataError names the host and what went wrong."""
    import pooch
    import requests
    import urllib3

    host = urlsplit(url).netloc
    # pooch reports each file on stderr; `Dataset.source` says the same in one line.
    with _progress() as bar, logging_from(logging.WARNING, pooch.get_logger()):
        transfer = _Transfer(bar, path.name)
        thread = threading.Thread(target=transfer.run, args=(url, path, md5), daemon=True)
        thread.start()
        try:
            while thread.is_alive() and not transfer.overdue:
                thread.join(0.05)
            overdue = thread.is_alive()
        finally:
            transfer.given_up = True  # also after Ctrl-C: the thread then removes its temporary file
            thread.join(0.2)
    try:
        if overdue:
            raise TimeoutError
        if transfer.error is not None:
            raise transfer.error
    except (TimeoutError, requests.Timeout):
        raise DataError(f"{host} did not answer in time") from None
    except requests.HTTPError as error:
        status = error.response.status_code if error.response is not None else error
        raise DataError(f"{host} answered {status} for {path.name}") from None
    except (requests.RequestException, urllib3.exceptions.HTTPError):
        what = f"broke off {path.name}" if transfer.received else "could not be reached"
        raise DataError(f"{host} {what}") from None
    except DataError as error:
        raise DataError(f"{host} {error} for {path.name}") from None
    except OSError as error:
        raise DataError(f"{path.parent} cannot be written ({error.strerror or type(error).__name__})") from None
    except ValueError:  # pooch: the checksum does not match
        raise DataError(f"{host} sent a {path.name} with a wrong checksum") from None


class _Transfer:
    """One download in a thread of its own, which records its progress for the waiting thread."""

    def __init__(self, bar: Any, label: str) -> None:
        self.bar, self.task = bar, bar.add_task(label, total=None) if bar else None
        self.received = 0
        self.noted = 0  # bytes received when `last_news` was set
        self.last_news = time.monotonic()
        self.given_up = False
        self.error: BaseException | None = None

    @property
    def overdue(self) -> bool:
        return time.monotonic() - self.last_news > (STALL_SECONDS if self.noted else ANSWER_SECONDS)

    def run(self, url: str, path: Path, md5: str) -> None:
        import pooch

        try:
            pooch.retrieve(url, f"md5:{md5}", fname=path.name, path=path.parent, downloader=self)
        except BaseException as error:  # raised by the waiting thread
            self.error = error

    def __call__(self, url: str, output_file: str, _: object) -> None:
        """Fill the temporary file `output_file`; called by pooch."""
        import requests

        options: dict[str, Any] = {"stream": True, "timeout": (ANSWER_SECONDS, STALL_SECONDS)}
        headers = {"Accept-Encoding": "identity"}  # the files are gzipped and must stay so
        with requests.Session() as session, session.get(url, headers=headers, **options) as response:
            response.raise_for_status()
            length = response.headers.get("Content-Length", "")
            total = int(length) if length.isdecimal() else None
            read = getattr(response.raw, "read1", response.raw.read)  # read1 (urllib3 2) returns what has arrived
            with open(output_file, "wb") as file:
                while chunk := read(CHUNK):
                    file.write(chunk)
                    self._note(len(chunk), total)
        if total is not None and self.received < total:
            raise requests.ConnectionError

    def _note(self, size: int, total: int | None) -> None:
        self.received += size
        if self.given_up:
            raise TimeoutError
        if self.received > MAX_BYTES:
            raise DataError(f"sent more than {MAX_BYTES:,} bytes")
        if self.received >= self.noted + CHUNK:
            self.noted, self.last_news = self.received, time.monotonic()
        if self.bar:
            self.bar.update(self.task, completed=self.received, total=total)


@contextmanager
def _progress() -> Iterator[Any]:
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        yield bar
