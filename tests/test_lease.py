"""Leases: of two processes that would write one URL, one does."""

import itertools
import os
import subprocess
import sys
import threading
import time

import pytest

from stampede import store_access, stores
from stampede.lease import Lease
from support.object_store import BUCKET, between, object_store
from support.waiting import HANG


@pytest.fixture
def store(tmp_path):
    with object_store(tmp_path / "stores") as files:
        yield files


HOLDS = """
import sys, time
from stampede.lease import Lease
Lease.SECONDS = 0.2
lease = Lease(sys.argv[1])
print("taken", flush=True)
time.sleep(600)
"""


def holder(url):
    program = [sys.executable, "-c", HOLDS, url]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "taken\n"
    return process


@pytest.mark.slow
def test_two_processes_cannot_write_one_url(store, monkeypatch):
    monkeypatch.setattr(Lease, "SECONDS", 1.0)
    with holder(f"{BUCKET}/runs/a") as process:
        with pytest.raises(stores.StoreError, match=f"is being written by process {process.pid}"):
            Lease(f"{BUCKET}/runs/a")
        Lease(f"{BUCKET}/runs/b").release()
        process.kill()
    # The process is known to have ended, as it was on this machine.
    started = time.monotonic()
    Lease(f"{BUCKET}/runs/a").release()
    assert time.monotonic() - started < 2.5
    assert not store.exists(f"{BUCKET}/runs/.a.lease")


WRITES = """
import sys
from stampede import stores
from stampede.lease import Lease
Lease.SECONDS = 0.2
with stores.outgoing(sys.argv[1], overwrite=True) as folder:
    folder.mkdir(parents=True)
    for number in range(3):
        (folder / f"part{number}").write_text("one")
    (folder / "manifest.json").write_text("one")
    print("written", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.slow
def test_two_machines_cannot_write_one_output(store, tmp_path, monkeypatch):
    monkeypatch.setattr(Lease, "SECONDS", 1.0)
    url, stays = f"{BUCKET}/package", subprocess.PIPE
    here = {**os.environ, "STAMPEDE_STORES": str(tmp_path / "other")}
    program = [sys.executable, "-c", WRITES, url]
    with subprocess.Popen(program, stdin=stays, stdout=stays, text=True, env=here) as other:
        assert other.stdout.readline() == "written\n"
        with (
            pytest.raises(
                stores.StoreError, match=f"^{url}: is being written by process {other.pid}"
            ),
            stores.outgoing(url, overwrite=True),
        ):
            pass
        other.communicate("\n")
    assert other.returncode == 0
    found = store.find(f"{BUCKET}/package")
    assert len(found) == 4 and {store.cat_file(name) for name in found} == {b"one"}
    assert not store.exists(f"{BUCKET}/.package.lease")


@pytest.mark.slow
def test_an_output_whose_lease_is_lost_is_not_copied_on(store):
    url = f"{BUCKET}/package"
    with (
        pytest.raises(stores.StoreError, match=f"^{url}: was taken over by another"),
        stores.outgoing(url, overwrite=False) as folder,
    ):
        folder.mkdir(parents=True)
        (folder / "manifest.json").write_text("one")
        store.pipe_file(f"{BUCKET}/.package.lease", b"{}")
    assert not store.find(url)


@pytest.mark.slow
def test_the_lease_of_a_lost_host_is_taken_over(store, monkeypatch):
    monkeypatch.setattr(Lease, "SECONDS", 0.2)
    store.pipe_file(f"{BUCKET}/runs/.a.lease", b'{"host": "gone", "process": 7, "beat": 3}')
    Lease(f"{BUCKET}/runs/a").release()


@pytest.mark.slow
def test_a_damaged_lease_is_taken_over(store, monkeypatch, capsys):
    monkeypatch.setattr(Lease, "SECONDS", 0.1)
    url = f"{BUCKET}/runs/a"
    for content in (b"", b"{\xff", b"[]", b'{"host": "x"}'):
        store.pipe_file(f"{BUCKET}/runs/.a.lease", content)
        Lease(url).release()
        assert f"{url} was being written by another process; wait" in capsys.readouterr().out


@pytest.mark.slow
def test_a_process_that_was_cut_off_notices(store, monkeypatch):
    monkeypatch.setattr(Lease, "SECONDS", 600.0)
    first = Lease(f"{BUCKET}/runs/a")
    monkeypatch.setattr(Lease, "SECONDS", 0.1)
    # As if it were on another machine.
    monkeypatch.setattr("stampede.lease._machine", lambda: "another")
    second = Lease(f"{BUCKET}/runs/a")
    with pytest.raises(stores.StoreError, match="taken over by another run"):
        first.check()
    first.release()
    second.check()
    second.release()
    assert not store.exists(f"{BUCKET}/runs/.a.lease")


@pytest.mark.slow
def test_a_write_that_comes_late_does_not_take_the_lease_back(store, monkeypatch):
    monkeypatch.setattr(Lease, "SECONDS", 0.1)
    whole = store_access.replace_object
    asked, taken, answered = (threading.Event() for _ in range(3))

    def late(*given):
        if threading.current_thread() is threading.main_thread():
            return whole(*given)
        asked.set()
        taken.wait(HANG)
        try:
            return whole(*given)
        finally:
            if threading.current_thread() is first._thread:
                answered.set()

    monkeypatch.setattr("stampede.lease.replace_object", late)
    first = Lease(f"{BUCKET}/runs/a")
    assert asked.wait(HANG)
    monkeypatch.setattr("stampede.lease._machine", lambda: "another")
    second = Lease(f"{BUCKET}/runs/a")
    taken.set()
    assert answered.wait(HANG)
    with pytest.raises(stores.StoreError, match="taken over by another run"):
        first.check()
    second.check()
    second.release()


@pytest.mark.slow
def test_of_two_that_take_a_lease_over_at_once_one_has_it(store, monkeypatch):
    monkeypatch.setattr(Lease, "SECONDS", 0.1)
    monkeypatch.setattr("stampede.lease._machine", lambda: "another")
    store.pipe_file(f"{BUCKET}/runs/a", b"")
    store.pipe_file(f"{BUCKET}/runs/.a.lease", b'{"host": "gone", "process": 7, "beat": 3}')
    waited, found = Lease._wait_for, []

    def wait_for(self, holder):
        monkeypatch.setattr(Lease, "_wait_for", waited)
        left = waited(self, holder)
        found.append(Lease(f"{BUCKET}/runs/a"))
        return left

    monkeypatch.setattr(Lease, "_wait_for", wait_for)
    with pytest.raises(stores.StoreError, match="taken over by another run"):
        Lease(f"{BUCKET}/runs/a")
    found[0].check()
    found[0].release()


@pytest.mark.slow
def test_a_store_that_does_not_compare_has_leases(store):
    refused = itertools.count()

    def answer(method, path):
        # Once with the condition, and then without it.
        if method == "PUT" and next(refused) == 0:
            return 501, None

    with between(answer):
        lease = Lease(f"{BUCKET}/runs/a")
        lease.check()
        lease.release()
    assert next(refused) >= 2


@pytest.mark.slow
def test_a_request_that_goes_wrong_is_not_made_without_its_condition(store):
    url = f"{BUCKET}/runs/a"
    store_access.replace_object(url, b"first", None)
    seen = store_access.seen_object(url)
    store_access.replace_object(url, b"second", seen)
    asked = itertools.count()

    def answer(method, path):
        if method == "PUT" and next(asked) == 0:
            return 400, None

    with between(answer), pytest.raises(stores.StoreError):
        store_access.replace_object(url, b"late", seen)
    assert stores.read_object(url) == b"second"


@pytest.mark.slow
def test_a_lease_does_not_wait_for_copies(store):
    """While all connections of the process are busy."""
    url, released, asked, paths = f"{BUCKET}/slow", threading.Event(), threading.Semaphore(0), []

    def answer(method, path):
        paths.append(path)
        if "/slow/" in path:
            asked.release()
            released.wait(HANG)

    with between(answer):
        lease = Lease(f"{BUCKET}/runs/a")
        del paths[:]
        copies = [
            threading.Thread(
                target=store_access.replace_object, args=(f"{url}/{number}", b"1", None)
            )
            for number in range(12)
        ]
        for copy in copies:
            copy.start()
        # As many as the driver has connections.
        assert all(asked.acquire(timeout=HANG) for _ in range(10))
        lease.check()
        released.set()
        for copy in copies:
            copy.join()
        lease.release()
    # Before the copies that wait, and before those that are asked for again after a while.
    assert paths[10].endswith("/runs/.a.lease")
