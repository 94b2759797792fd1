"""Parquet in the paper's schema, and a loopback web server that serves it as badly as it is told."""

from __future__ import annotations

import html
import json
import re
import threading
import time
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pyarrow as pa
from pyarrow import parquet


def write_rows(path: Path, texts, scores=None, row_group_size=20, **options) -> None:
    table = pa.table(
        {
            "content": pa.array(texts, pa.string()),
            "score": pa.array(scores or [0.9] * len(texts), pa.float64()),
            "source": pa.array(["web"] * len(texts), pa.string()),
        }
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table, path, row_group_size=row_group_size, **options)


class Server:
    """A folder, and how it is served.

    Attributes:
        errors: what to do with the next requests for parts of files, in turn; None serves one well.
        broken: names that are always answered with status 500.
        requests: (method, path) of everything that was asked.
        ranges: whether parts of files are served.
        retry_after: the header of answers to the error "later".
    """

    def __init__(self, root: Path):
        self.root, self.errors, self.broken, self.requests = root, [], set(), []
        self.ranges, self.retry_after = True, "1"
        self.lock = threading.Lock()
        self.address = ""

    def next_error(self):
        with self.lock:
            return self.errors.pop(0) if self.errors else None


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, server: Server, *arguments):
        self.state = server
        super().__init__(*arguments)

    def log_message(self, *arguments) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        self.state.requests.append((self.command, self.path))
        path = unquote(self.path.partition("?")[0])
        if path.startswith("/api/"):
            return self.send(200, json.dumps(self.hub(path)).encode(), "application/json")
        place = self.state.root / re.sub(
            r"^/datasets/[^/]+/[^/]+/resolve/[0-9a-f]{40}/", "/", path
        ).lstrip("/")
        if place.is_dir():
            names = [entry.name + "/" * entry.is_dir() for entry in sorted(place.iterdir())]
            names = [html.escape(name) for name in ["../", "./", "?C=N;O=D", *names]]
            links = "".join(f'<a href="{name}">{name}</a>' for name in names)
            return self.send(200, f"<html>{links}</html>".encode(), "text/html")
        if not place.is_file():
            return self.send(404, b"", "text/plain")
        if place.name in self.state.broken:
            return self.send(500, b"broken", "text/plain")
        content = place.read_bytes()
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if not (wanted and self.state.ranges):
            return self.send(
                200, content if body else None, "application/octet-stream", len(content)
            )
        self.part(
            content[int(wanted[1]) : int(wanted[2]) + 1],
            int(wanted[1]),
            len(content),
            self.state.next_error(),
        )
        return None

    def part(self, content: bytes, start: int, size: int, error: str | None) -> None:
        half = content[: len(content) // 2]
        if error == "drop":
            self.close_connection = True
            self.connection.close()
        elif error == "error":
            self.send(500, b"try again", "text/plain")
        elif error == "later":
            self.send(429, b"later", "text/plain", retry_after=self.state.retry_after)
        elif error == "stall":
            time.sleep(1.0)
            self.close_connection = True
        else:  # "half": the connection ends in the middle; "short": well-formed, with too little
            sent = half if error in ("half", "short") else content
            self.send_response(206)
            self.send_header("Content-Length", str(len(half if error == "short" else content)))
            self.send_header("Content-Range", f"bytes {start}-{start + len(sent) - 1}/{size}")
            self.end_headers()
            self.wfile.write(sent)
            self.close_connection = error == "half"

    def send(
        self,
        status: int,
        content: bytes | None,
        kind: str,
        length: int | None = None,
        retry_after: str | None = None,
    ) -> None:
        self.send_response(status)
        if retry_after is not None:
            self.send_header("Retry-After", retry_after)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content or b"") if length is None else length))
        self.end_headers()
        if content and self.command != "HEAD":
            self.wfile.write(content)

    def hub(self, path: str):
        """The two questions about a data set that listing asks of the hub."""
        if "/tree/" not in path:
            return {"id": "owner/name", "sha": "a" * 40}
        folder = path.split("/tree/")[1].partition("/")[2]
        found = sorted(entry for entry in (self.state.root / folder).rglob("*"))
        kinds = {True: "directory", False: "file"}
        return [
            {
                "type": kinds[entry.is_dir()],
                "path": entry.relative_to(self.state.root).as_posix(),
                "size": 0 if entry.is_dir() else entry.stat().st_size,
                "oid": "b" * 40,
            }
            for entry in found
        ]


class QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address) -> None:
        pass  # clients hang up in the middle of what we do to them


@contextmanager
def serving(root: Path):
    state = Server(root)
    with QuietServer(("127.0.0.1", 0), partial(Handler, state)) as server:
        state.address = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        yield state
        server.shutdown()
        thread.join()
