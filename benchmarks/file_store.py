"""An S3 server that sends files from a folder, with a latency and a rate, and takes little time.

moto's reads a whole key to send a part of it: 16 of 46 seconds of a training on two cores.
"""

from __future__ import annotations

import os
import re
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

_PIECE = 256 << 10


class FileStore(ThreadingHTTPServer):
    """Serves `folder/BUCKET/KEY` on a free port of this machine; all answers share the rate."""

    daemon_threads = True

    def __init__(self, folder: Path, latency: float, bytes_per_second: float) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.latency, self._rate = folder, latency, bytes_per_second
        self._free, self._lock = 0.0, threading.Lock()

    def carry(self, count: int) -> None:
        """Wait until so many bytes have passed, behind those before them."""
        with self._lock:
            self._free = max(self._free, time.monotonic()) + count / self._rate
            until = self._free
        time.sleep(max(0.0, until - time.monotonic()))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FileStore

    def do_GET(self) -> None:
        time.sleep(self.server.latency)
        asked = urlsplit(self.path)
        path, query = unquote(asked.path).strip("/"), parse_qs(asked.query)
        if "list-type" in query:
            self._list(path, query.get("prefix", [""])[0], "delimiter" in query)
        elif (file := self.server.folder / path).is_file():
            self._send(file)
        else:
            found = file.is_dir() and "/" not in path
            self.send_response(200 if found else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()

    do_HEAD = do_GET  # noqa: N815

    def _send(self, file: Path) -> None:
        about = file.stat()
        start, end = 0, about.st_size
        given = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if given:
            start, end = int(given[1]), min(int(given[2] or end - 1) + 1, end)
        if start > end:
            self.send_error(416)
            return
        self.send_response(206 if given else 200)
        self.send_header("Content-Length", str(end - start))
        self.send_header("ETag", f'"{about.st_mtime_ns:x}-{about.st_size:x}"')
        self.send_header("Last-Modified", self.date_time_string(about.st_mtime))
        if given:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{about.st_size}")
        self.end_headers()
        if self.command == "HEAD":
            return
        # Who reads ahead may end before all of it came.
        with file.open("rb") as opened, suppress(ConnectionError):
            while start < end:
                count = min(_PIECE, end - start)
                self.server.carry(count)
                start += os.sendfile(self.connection.fileno(), opened.fileno(), start, count)

    def _list(self, bucket: str, prefix: str, has_delimiter: bool) -> None:
        root = self.server.folder / bucket
        files = {str(file.relative_to(root)): file for file in root.rglob("*") if file.is_file()}
        keys, folders = [], set()
        for key, file in sorted(files.items()):
            if not key.startswith(prefix):
                continue
            inside, is_deeper, _ = key[len(prefix) :].partition("/")
            if has_delimiter and is_deeper:
                folders.add(f"{prefix}{inside}/")
                continue
            about = file.stat()
            when = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(about.st_mtime))
            keys.append(
                f"<Contents><Key>{escape(key)}</Key><LastModified>{when}</LastModified>"
                f'<ETag>"{about.st_mtime_ns:x}-{about.st_size:x}"</ETag>'
                f"<Size>{about.st_size}</Size></Contents>"
            )
        prefixes = [f"<CommonPrefixes><Prefix>{escape(one)}</Prefix></CommonPrefixes>"
                    for one in sorted(folders)]  # fmt: skip
        body = "".join([
            f"<ListBucketResult><Name>{bucket}</Name><Prefix>{escape(prefix)}</Prefix>",
            f"<KeyCount>{len(keys) + len(folders)}</KeyCount><IsTruncated>false</IsTruncated>",
            *keys, *prefixes, "</ListBucketResult>",
        ]).encode()  # fmt: skip
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass
