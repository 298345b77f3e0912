"""An S3 server on this machine, and one whose answers go wrong in between."""

import http.client
import logging
import os
from contextlib import contextmanager, suppress
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from unittest.mock import patch
from urllib.request import urlopen

import fsspec

BUCKET = "s3://clicks"
# What users have in their environment.
USER = {
    "AWS_ACCESS_KEY_ID": "somebody",
    "AWS_SECRET_ACCESS_KEY": "a-secret",
    "AWS_DEFAULT_REGION": "us-east-1",
}

_ERRORS = {
    status: f"<Error><Code>{code}</Code><Message>{code}</Message></Error>"
    for status, code in (
        (400, "InvalidRequest"),
        (403, "AccessDenied"),
        (404, "NoSuchKey"),
        (501, "NotImplemented"),
        (503, "SlowDown"),
    )
}


@contextmanager
def object_store(folder):
    """Serve an empty bucket `BUCKET`; local copies go to `folder`. Yields a file system."""
    port = _server()
    urlopen(f"http://127.0.0.1:{port}/moto-api/reset", b"").close()
    with at_port(port), patch.dict(os.environ, {"STAMPEDE_STORES": str(folder)}):
        files = fsspec.filesystem("s3")
        files.mkdir(BUCKET)
        yield files


@cache
def _server():
    """The port of this process's server, which ends with it: stopping one takes half a second."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    return server.get_host_and_port()[1]


@contextmanager
def at_port(port):
    """Let all of this process and its children find the store at a port of this machine."""
    here = {**USER, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
    with patch.dict(os.environ, here):
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        yield
    fsspec.get_filesystem_class("s3").clear_instance_cache()


@contextmanager
def between(answer):
    """Put a proxy before the store, which spoils some of its answers.

    `answer(method, path)` returns a status and how many bytes of the body are sent before the
    connection is cut (None: all); or None, which spoils nothing.
    """
    store = os.environ["AWS_ENDPOINT_URL"].removeprefix("http://")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _forward(self):
            given = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            connection = http.client.HTTPConnection(store)
            connection.request(self.command, self.path, given, dict(self.headers))
            found = connection.getresponse()
            body, kept = found.read(), dict(found.getheaders())
            status, cut = answer(self.command, self.path) or (found.status, None)
            if status >= 400 and status != found.status:
                body, kept = _ERRORS[status].encode(), {"Content-Type": "application/xml"}
            self.send_response(status)
            for name, value in kept.items():
                if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                    self.send_header(name, value)
            length = found.getheader("Content-Length") if self.command == "HEAD" else len(body)
            self.send_header("Content-Length", str(length))
            self.end_headers()
            if self.command != "HEAD":
                # Who reads ahead may end before all of it came.
                with suppress(ConnectionError):
                    self.wfile.write(memoryview(body)[:cut])
            if cut is not None:
                self.close_connection = True

        do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _forward  # noqa: N815

        def log_message(self, *_):
            pass

    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    proxy.daemon_threads = True
    thread = Thread(target=proxy.serve_forever, daemon=True)
    thread.start()
    try:
        with at_port(proxy.server_address[1]):
            yield
    finally:
        proxy.shutdown()
        proxy.server_close()
        thread.join()
