"""Where parquet files lie: a folder, a web server, the Hugging Face hub, or what fsspec reads.

A store lists files with their sizes and reads ranges of bytes; the file systems of fsspec do the
reading. `Patient` adds what they lack: short answers and failures are tried again, from the byte
where the last answer ended, so that a file is never read from its beginning because its end was
lost.
"""

from __future__ import annotations

import io
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from email.utils import parsedate_to_datetime
from functools import partial
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, unquote, urljoin

import fsspec

from lrattnres.data.errors import DataError, UnreadableError
from lrattnres.data.listing import File, hidden, warn_hidden

if TYPE_CHECKING:
    from aiohttp import ClientResponse

T = TypeVar("T")
ENDING = ".parquet"
LONGEST_PAUSE = 60.0  # seconds
LISTING_THREADS = 16
CHUNK = 1 << 20  # bytes
TRY_LATER = {408, 425, 429}  # and every 5xx


class Refused(Exception):
    """An answer that no further try will change."""


class Later(Exception):
    """An answer that may change, no sooner than in `seconds`."""

    def __init__(self, message: str, seconds: float):
        super().__init__(message)
        self.seconds = seconds


class StoppedError(DataError):
    """Nobody waits for the answer. Not an UnreadableError: nothing is passed over for it."""


class Store:
    """A prefix of any file system that fsspec has, such as s3://BUCKET/FOLDER.

    Attributes:
        root: the prefix, as it was written.
        revision: the commit of the hub; None elsewhere.
        local: whether listing costs next to nothing, and reads cannot fail for a while only.
    """

    revision: str | None = None
    local = False
    protocol = ""  # of the file system, where the root does not say it

    def __init__(self, root: str, timeout: float):
        """Reads nothing yet.

        Args:
            root: the prefix.
            timeout: seconds without an answer after which a read fails.

        Raises:
            DataError: the file system is not installed, or there is none for the prefix.
        """
        self.root, protocol = root, self.protocol or root.partition("://")[0]
        try:
            self._system = fsspec.filesystem(protocol, **self._options(protocol, timeout))
        except (ImportError, ValueError) as error:
            raise DataError(
                f"data.root={root}: {error}; install the file system of {protocol}:// (pip install "
                "lrattnres[s3] for s3), or write a folder or an http(s):// prefix"
            ) from error
        self._path = self._system._strip_protocol(root).rstrip("/")

    def files(self) -> list[File]:
        """Every parquet file below the root, in any order. Raises what `read` raises."""
        return self._below(self._path, self._system.find(self._path, detail=True))

    def read(self, path: str, start: int, length: int) -> bytes:
        """`length` bytes from `start` of the file `path`, or fewer.

        Raises:
            Refused: no further try will help.
            Exception: what the library of the file system raises; a further try may help.
        """
        try:
            return self._system.cat_file(f"{self._path}/{path}", start=start, end=start + length)
        except (FileNotFoundError, PermissionError) as error:
            raise Refused(str(error)) from error

    def _options(self, protocol: str, timeout: float) -> dict[str, Any]:
        if protocol not in ("s3", "s3a"):
            return {}
        patience = {"connect_timeout": timeout, "read_timeout": timeout}
        return {"config_kwargs": patience | {"retries": {"max_attempts": 1}}}

    @staticmethod
    def _below(path: str, found: Mapping[str, Mapping[str, Any]]) -> list[File]:
        return [
            File(name[len(path) + 1 :], entry["size"])
            for name, entry in found.items()
            if name.endswith(ENDING)
        ]


class Folder(Store):
    """A folder of this machine, with everything below it, or one file."""

    local = True
    protocol = "file"

    def files(self) -> list[File]:
        if not self._system.exists(self._path):
            return []
        try:
            found = self._system.find(self._path, detail=True, on_error="raise")
        except OSError as error:
            raise Refused(str(error)) from error
        if self._path in found:
            self._path = self._path.rpartition("/")[0]
        return self._below(self._path, found)

    def read(self, path: str, start: int, length: int) -> bytes:
        content = super().read(path, start, length)
        if len(content) < length:
            ends = start + len(content)
            raise Refused(f"it ends after {ends:,} bytes, where {start + length:,} belong")
        return content


class Web(Store):
    """A folder of a web server that lists its files as links, and serves ranges."""

    protocol = "https"

    def __init__(self, root: str, timeout: float):
        super().__init__(root, timeout)
        self.root, self._headers = root.rstrip("/") + "/", dict[str, str]()

    def _options(self, protocol: str, timeout: float) -> dict[str, Any]:
        import aiohttp

        patience = aiohttp.ClientTimeout(total=None, sock_connect=timeout, sock_read=timeout)
        client = {"timeout": patience, "raise_for_status": _judged, "trust_env": True}
        return {"client_kwargs": client, "skip_instance_cache": True}

    def files(self) -> list[File]:
        # fsspec's own listing leaves out links that begin with "http", such as httpd.parquet, and
        # takes &amp; and ./ for parts of a name. So it fetches the pages, and we read the links.
        links, folders = set[str](), [self.root]
        for folder in folders:  # grows as subfolders are found
            page = _Links(self._system.cat_file(folder).decode("utf-8", "replace"))
            for href in page.found:
                link = urljoin(folder, href).partition("?")[0].partition("#")[0]
                if link.startswith(folder) and link.endswith("/") and link not in folders:
                    folders.append(link)
                elif link.startswith(folder) and link.endswith(ENDING):
                    links.add(link)
        with ThreadPoolExecutor(LISTING_THREADS) as pool:
            sizes = pool.map(self._size, sorted(links))
        begin = len(self.root)
        return [
            File(unquote(link[begin:]), size)
            for link, size in zip(sorted(links), sizes, strict=True)
        ]

    def read(self, path: str, start: int, length: int) -> bytes:
        # A stream, and not cat_file: what comes before the connection breaks need not come again.
        address, pieces = self.address(path), list[bytes]()
        headers = {"Range": f"bytes={start}-{start + length - 1}", "Accept-Encoding": "identity"}
        headers |= self._headers
        with self._system.open(address, block_size=0, size=length, headers=headers) as file:
            try:
                while piece := file.read(CHUNK):
                    pieces.append(piece)
            except Exception:
                if not pieces:
                    raise
        return b"".join(pieces)

    def address(self, path: str) -> str:
        """The URL of a file."""
        return self.root + quote(path)

    def _size(self, link: str) -> int:
        try:
            size = self._system.info(link)["size"]
        except FileNotFoundError as error:  # for any failure: what it was is behind it
            raise error.__cause__ or error from None
        if size is None:
            raise Refused(f"{link}: the server does not tell its size")
        return size


class Hub(Web):
    """A folder of a data set of the hub, `hf://datasets/OWNER/NAME/FOLDER`, at one revision.

    A branch, or none, is resolved to the commit that is the newest when the files are listed.
    huggingface_hub's file system lists them; their bytes come over https as those of any server:
    its own reads have a timeout and tries that no setting of ours reaches, sleep through a stop,
    and lose what came before a connection broke.
    """

    def __init__(self, root: str, timeout: float):
        from huggingface_hub import HfApi, HfFileSystem, get_token, hf_hub_url

        super().__init__(root, timeout)
        kind, owner, name, *folder = [*root.partition("://")[2].strip("/").split("/"), "", ""]
        if kind != "datasets" or not name:
            raise DataError(
                f"data.root={root}: no data set of the hub; write hf://datasets/OWNER/NAME/FOLDER"
            )
        endpoint, token = os.environ.get("HF_ENDPOINT") or None, get_token()
        self._repository, self._folder = f"{owner}/{name}", "/".join(folder).strip("/")
        self._tree = HfFileSystem(endpoint=endpoint)
        self._info = partial(HfApi(endpoint=endpoint).dataset_info, timeout=timeout)
        self._url = partial(hf_hub_url, self._repository, repo_type="dataset", endpoint=endpoint)
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def files(self) -> list[File]:
        from huggingface_hub.errors import HfHubHTTPError

        try:
            if self.revision is None or len(self.revision) != 40:
                self.revision = self._info(self._repository, revision=self.revision).sha
            place = f"datasets/{self._repository}@{self.revision}/{self._folder}".rstrip("/")
            found: Any = self._tree.find(place, detail=True)
            return self._below(place, found)
        except HfHubHTTPError as error:
            answer = error.response
            _judge(str(error).partition("\n")[0], answer.status_code, answer.headers)
            raise

    def address(self, path: str) -> str:
        return self._url(f"{self._folder}/{path}".lstrip("/"), revision=self.revision)


class Patient:
    """A store whose reads are tried again."""

    def __init__(self, store: Store, *, timeout: float, retries: int):
        """`retries`: further tries of a read, each of which may take `timeout` seconds."""
        self._store, self._retries = store, retries
        self.root, self.local = store.root, store.local
        self._patience = (retries + 1) * timeout + sum(map(_pause_before, range(1, retries + 1)))

    @property
    def revision(self) -> str | None:
        """The commit of the hub; None elsewhere."""
        return self._store.revision

    def files(self) -> list[File]:
        """Every parquet file below the root, sorted by relative path, but for hidden ones.

        A warning says how many were left out since a part of their path begins with a dot or an
        underscore: what notebooks, git and other writers keep there are copies and leftovers.

        Raises:
            UnreadableError: the store refuses, or fails after all tries.
            DataError: there is no parquet file.
        """
        found = sorted(self._tried(self._store.files, self.root), key=lambda file: file.path)
        kept = [file for file in found if not hidden(file.path)]
        warn_hidden(self.root, [file.path for file in found if hidden(file.path)])
        if not kept:
            raise DataError(f"data.root={self.root}: holds no file that ends with {ENDING}")
        return kept

    def read(self, path: str, start: int, length: int) -> bytes:
        """Exactly `length` bytes from `start` of the file `path`.

        Raises:
            UnreadableError: the store refuses, or fails after all tries.
            StoppedError: the pool of this thread was stopped.
        """
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
        begin, wait = time.monotonic(), 0.0
        for tried in range(1, self._retries + 2):
            _pause(wait)
            try:
                return read()
            except Refused as refusal:
                raise UnreadableError(f"{place}: refused: {refusal}") from refusal
            except DataError:
                raise
            except Exception as error:  # each library has its own for a network that fails
                last = error
            asked = last.seconds if isinstance(last, Later) else 0.0
            wait = max(_pause_before(tried), asked)
            if time.monotonic() - begin + asked > self._patience:
                break  # the server wants to be left alone for longer than we may try
        said = str(last) or repr(last.__cause__)
        raise UnreadableError(
            f"{place}: unreadable after {tried} tries in {time.monotonic() - begin:.0f} s, the "
            f"last one: {type(last).__name__}: {said}; data.retries and data.timeout give it "
            "longer, data.skip_unreadable=true passes over what stays unreadable"
        ) from last


class ReadingPool(ThreadPoolExecutor):
    """Threads that give up what they read when the pool is stopped.

    Else a process could not end before its last try.
    """

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
        """`size`: the bytes that the file had when it was listed."""
        super().__init__()
        self._store, self._path, self._size, self._position = store, path, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origins = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}
        self._position = offset + origins[whence]
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


def _pause_before(retry: int) -> float:
    """Seconds: 1, 2, 4 … before the first, second, third further try."""
    return min(LONGEST_PAUSE, 2.0 ** (retry - 1))


def _pause(seconds: float) -> None:
    """Waits, unless the pool of this thread is stopped: nobody waits for its answer then."""
    if not hasattr(_here, "stopped"):
        time.sleep(seconds)
    elif _here.stopped.wait(seconds):
        raise StoppedError("reading was stopped")


STORES: dict[str, Callable[[str, float], Store]] = {
    "": Folder,
    "file": Folder,
    "http": Web,
    "https": Web,
    "hf": Hub,
}


def open_store(root: str, *, timeout: float, retries: int, revision: str | None = None) -> Patient:
    """The store of `data.root`. Nothing is read yet.

    Args:
        root: a folder, or a prefix PROTOCOL://…
        timeout: seconds without an answer after which a read is tried again.
        retries: further tries of a read.
        revision: commit or branch of the hub; None: the newest.

    Raises:
        DataError: the prefix is none that can be read here.
    """
    protocol = root.partition("://")[0] if "://" in root else ""
    store = STORES.get(protocol, Store)(root, timeout)
    if revision is not None:
        store.revision = revision
    return Patient(store, timeout=timeout, retries=retries)


async def _judged(answer: ClientResponse) -> None:
    """Called by aiohttp for every answer, before its body is read."""
    place, asked = str(answer.url), answer.request_info.headers.get("Range")
    try:
        _judge(f"{place}: status {answer.status} {answer.reason}", answer.status, answer.headers)
        given = answer.headers.get("Content-Range", "").replace(" ", "=", 1)
        if asked and answer.status != 206:
            raise Refused(
                f"{place}: the server does not serve ranges of bytes (status {answer.status})"
            )
        if asked and not given.startswith(asked.partition("-")[0] + "-"):
            raise Refused(
                f"{place}: {given or 'no Content-Range'} came where {asked} was asked for"
            )
    except BaseException:
        answer.close()
        raise


def _judge(message: str, status: int, headers: Mapping[str, str]) -> None:
    """Raises Refused or Later for a status that stands for one."""
    if status in TRY_LATER or status >= 500:
        raise Later(message, _seconds(headers.get("Retry-After")))
    if status >= 400:
        raise Refused(message)


def _seconds(retry_after: str | None) -> float:
    """What the header Retry-After asks for: a number of seconds, or a date."""
    if retry_after is None:
        return 0.0
    if retry_after.strip().isdigit():
        return float(retry_after)
    try:
        moment = parsedate_to_datetime(retry_after)
    except ValueError:
        return 0.0
    return max(0.0, moment.timestamp() - time.time())


class _Links(HTMLParser):
    def __init__(self, page: str):
        super().__init__()
        self.found: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found += [
            value for name, value in attributes if tag == "a" and name == "href" and value
        ]
