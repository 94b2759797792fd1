"""Where parquet files lie: a folder, a web server, the Hugging Face hub, or whatever fsspec has a file system for.

A store lists files with their sizes and reads ranges of bytes. `Patient` makes any store stubborn: short answers and
failures are tried again, so a file is never read from its beginning because its end was lost.
"""

from __future__ import annotations

import io
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import quote, unquote, urljoin, urlsplit

import requests

from lrattnres.data.errors import DataError, UnreadableError
from lrattnres.data.listing import File

T = TypeVar("T")
ENDING = ".parquet"
LONGEST_PAUSE = 60.0
LISTING_THREADS = 16
CHUNK = 1 << 18  # bytes
TRY_LATER = {408, 425, 429}  # and every 5xx


class Refused(Exception):
    """An answer that no further try will change."""


class StoppedError(DataError):
    """Nobody waits for the answer any more. Not an UnreadableError: nothing is passed over for it."""


class Store(Protocol):
    root: str
    revision: str | None

    def files(self) -> list[File]:
        """Every parquet file below the root, sorted by relative path."""

    def read(self, path: str, start: int, length: int) -> bytes:
        """`length` bytes from `start`, or fewer; raises Refused, OSError or what its library raises."""


class Folder:
    """A local folder, with everything below it, or one file."""

    revision: str | None = None

    def __init__(self, root: str, timeout: float):
        self.root, self._path = root, Path(root).expanduser()

    def files(self) -> list[File]:
        if self._path.is_file():
            self._path, found = self._path.parent, [self._path]
        else:
            found = [path for path in self._path.rglob("*" + ENDING) if path.is_file()]
        return _sorted(
            [File(path.relative_to(self._path).as_posix(), path.stat().st_size) for path in found]
        )

    def read(self, path: str, start: int, length: int) -> bytes:
        try:
            with (self._path / path).open("rb", buffering=0) as file:
                file.seek(start)
                content = b"".join(iter(lambda: file.read(length - file.tell() + start), b""))
        except (FileNotFoundError, PermissionError) as error:
            raise Refused(str(error)) from error
        if len(content) < length:
            raise Refused(
                f"it ends after {start + len(content):,} bytes, where {start + length:,} belong"
            )
        return content


class Web:
    """A folder of a web server that lists its files as links, and serves ranges."""

    revision: str | None = None

    def __init__(self, root: str, timeout: float):
        self.root, self._timeout = root.rstrip("/") + "/", timeout
        self._local = threading.local()

    def files(self) -> list[File]:
        links, folders = set[str](), [self.root]
        for folder in folders:  # grows as subfolders are found
            page = _Links(self._get(folder).text)
            for link in (
                urljoin(folder, href).partition("?")[0].partition("#")[0] for href in page.found
            ):
                if link.startswith(folder) and link.endswith("/") and link not in folders:
                    folders.append(link)
                elif link.startswith(folder) and link.endswith(ENDING):
                    links.add(link)
        with ThreadPoolExecutor(LISTING_THREADS) as pool:
            sizes = list(pool.map(self._size, sorted(links)))
        return _sorted(
            [
                File(unquote(link[len(self.root) :]), size)
                for link, size in zip(sorted(links), sizes, strict=True)
            ]
        )

    def read(self, path: str, start: int, length: int) -> bytes:
        headers = {"Range": f"bytes={start}-{start + length - 1}", "Accept-Encoding": "identity"}
        pieces: list[bytes] = []
        with self._get(self.address(path), headers=headers, stream=True) as answer:
            if answer.status_code != 206:
                raise Refused(
                    f"{self.address(path)}: the server does not serve ranges of bytes (status {answer.status_code})"
                )
            try:
                pieces.extend(answer.iter_content(CHUNK))
            except requests.RequestException:
                if not pieces:
                    raise
        return b"".join(pieces)  # what came before the connection broke need not come again

    def address(self, path: str) -> str:
        return self.root + quote(path)

    def _size(self, link: str) -> int:
        answer = self._get(link, method="HEAD", headers={"Accept-Encoding": "identity"})
        if "Content-Length" not in answer.headers:
            raise Refused(f"{link}: the server does not tell its size")
        return int(answer.headers["Content-Length"])

    def _get(self, address: str, method: str = "GET", **options: Any) -> requests.Response:
        if not hasattr(
            self._local, "session"
        ):  # sessions keep connections open, and belong to one thread
            self._local.session = requests.Session()
        answer = self._local.session.request(
            method, address, timeout=self._timeout, allow_redirects=True, **options
        )
        if 400 <= answer.status_code < 500 and answer.status_code not in TRY_LATER:
            raise Refused(f"{address}: status {answer.status_code} {answer.reason}")
        answer.raise_for_status()
        return answer


class Hub(Web):
    """A folder of a data set on the Hugging Face hub, `hf://datasets/OWNER/NAME/FOLDER`, at one revision.

    A branch, or none, is resolved to the commit that is the newest when the files are listed.
    """

    def __init__(self, root: str, timeout: float):
        from huggingface_hub import HfApi, get_token, hf_hub_url

        super().__init__(root, timeout)
        kind, owner, name, *folder = (
            urlsplit(root).netloc,
            *urlsplit(root).path.strip("/").split("/"),
        )
        if kind != "datasets" or not name:
            raise DataError(
                f"data.root={root}: no data set of the hub; write hf://datasets/OWNER/NAME/FOLDER"
            )
        endpoint = os.environ.get("HF_ENDPOINT") or None
        self._api, self._repository, self._folder = (
            HfApi(endpoint=endpoint),
            f"{owner}/{name}",
            "/".join(folder),
        )
        self._url = partial(hf_hub_url, self._repository, repo_type="dataset", endpoint=endpoint)
        token = get_token()
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def files(self) -> list[File]:
        if self.revision is None or len(self.revision) != 40:
            self.revision = self._api.dataset_info(
                self._repository, revision=self.revision, timeout=self._timeout
            ).sha
        from huggingface_hub.hf_api import RepoFile

        tree = self._api.list_repo_tree(
            self._repository,
            self._folder or None,
            recursive=True,
            revision=self.revision,
            repo_type="dataset",
        )
        begin = len(self._folder) + 1 if self._folder else 0
        found = [
            File(entry.path[begin:], entry.size) for entry in tree if isinstance(entry, RepoFile)
        ]
        return _sorted([file for file in found if file.path.endswith(ENDING)])

    def address(self, path: str) -> str:
        return self._url(f"{self._folder}/{path}".lstrip("/"), revision=self.revision)

    def _get(self, address: str, method: str = "GET", **options: Any) -> requests.Response:
        headers = self._headers | options.pop("headers", {})
        return super()._get(address, method, headers=headers, **options)


class Fsspec:
    """Any other prefix, such as s3://BUCKET/FOLDER, by the file system that fsspec has for it."""

    revision: str | None = None

    def __init__(self, root: str, timeout: float):
        import fsspec

        protocol = root.partition("://")[0]
        patience = {
            "connect_timeout": timeout,
            "read_timeout": timeout,
            "retries": {"max_attempts": 1},
        }
        options = {"config_kwargs": patience} if protocol in ("s3", "s3a") else {}
        try:
            self._system = fsspec.filesystem(protocol, **options)
        except (ImportError, ValueError) as error:
            raise DataError(
                f"data.root={root}: {error}; install the file system of {protocol}:// (pip install lrattnres[s3] for s3), or "
                "write a folder or an http(s):// prefix"
            ) from error
        self.root, self._path = root, self._system._strip_protocol(root).rstrip("/")

    def files(self) -> list[File]:
        found = self._system.find(self._path, detail=True)
        files = [
            File(name[len(self._path) + 1 :], entry["size"])
            for name, entry in found.items()
            if name.endswith(ENDING)
        ]
        return _sorted(files)

    def read(self, path: str, start: int, length: int) -> bytes:
        return self._system.cat_file(f"{self._path}/{path}", start=start, end=start + length)


class Patient:
    """A store whose reads are tried again. Raises UnreadableError once all tries are used, DataError for a refusal."""

    def __init__(self, store: Store, retries: int):
        self._store, self._retries, self.root = store, retries, store.root

    @property
    def revision(self) -> str | None:
        return self._store.revision

    def files(self) -> list[File]:
        found = self._tried(self._store.files, self.root)
        if not found:
            raise DataError(f"data.root={self.root}: holds no file that ends with {ENDING}")
        return found

    def read(self, path: str, start: int, length: int) -> bytes:
        """Exactly `length` bytes."""
        place = f"{self.root.rstrip('/')}/{path}"
        pieces, missing = list[bytes](), length

        def rest() -> None:
            nonlocal missing
            piece = self._store.read(path, start + length - missing, missing)
            if len(piece) > missing:
                raise Refused(f"{len(piece):,} bytes came where {missing:,} were asked for")
            pieces.append(piece)
            missing -= len(piece)
            if missing:
                raise OSError(f"{missing:,} bytes of {length:,} are missing")

        self._tried(rest, place)
        return b"".join(pieces)

    def _tried(self, read: Callable[[], T], place: str) -> T:
        begin = time.monotonic()
        for number in range(self._retries + 1):
            _pause(min(LONGEST_PAUSE, 2.0 ** (number - 1)) if number else 0.0)
            try:
                return read()
            except Refused as refusal:
                raise UnreadableError(f"{place}: refused: {refusal}") from refusal
            except DataError:
                raise
            except Exception as error:  # each library has its own for a network that fails
                fault = error
        raise UnreadableError(
            f"{place}: unreadable after {self._retries + 1} tries in {time.monotonic() - begin:.0f} s, the last one: "
            f"{type(fault).__name__}: {fault}; data.retries and data.timeout give it longer, data.skip_unreadable=true "
            "passes over what stays unreadable"
        ) from fault


class ReadingPool(ThreadPoolExecutor):
    """Threads that give up what they read when the pool is stopped: else a process could not end before its last try."""

    def __init__(self, threads: int):
        self._stopped = threading.Event()
        super().__init__(threads, "data", _heed, (self._stopped,))

    def stop(self) -> None:
        """Drops what was submitted. Does not wait."""
        self._stopped.set()
        self.shutdown(wait=False, cancel_futures=True)


class RangeFile(io.RawIOBase):
    """A file of a store, as Arrow reads it."""

    def __init__(self, store: Patient, path: str, size: int):
        super().__init__()
        self._store, self._path, self._size, self._position = store, path, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = (
            offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        )
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._size - self._position)
        length = left if size < 0 else min(size, left)
        content = self._store.read(self._path, self._position, length) if length else b""
        self._position += length
        return content


_here = threading.local()


def _heed(stopped: threading.Event) -> None:
    _here.stopped = stopped


def _pause(seconds: float) -> None:
    """Waits, but not on when the pool of this thread is stopped: nobody waits for its answer then."""
    if not hasattr(_here, "stopped"):
        time.sleep(seconds)
    elif _here.stopped.wait(seconds):
        raise StoppedError("reading was stopped")


STORES: dict[str, Callable[[str, float], Store]] = {
    "": Folder,
    "http": Web,
    "https": Web,
    "hf": Hub,
}


def open_store(root: str, *, timeout: float, retries: int, revision: str | None = None) -> Patient:
    """The store of `root`. Nothing is read yet."""
    protocol = root.partition("://")[0] if "://" in root else ""
    store = STORES.get(protocol, Fsspec)(root, timeout)
    if revision is not None:
        store.revision = revision
    return Patient(store, retries)


class _Links(HTMLParser):
    def __init__(self, page: str):
        super().__init__()
        self.found: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found += [
            value for name, value in attributes if tag == "a" and name == "href" and value
        ]


def _sorted(files: list[File]) -> list[File]:
    return sorted(files, key=lambda file: file.path)
