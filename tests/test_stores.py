"""Files and folders of an object store: what arrives here, what is copied there, what is said."""

import errno
import os
import subprocess
import sys
import time

import pytest

from stampede import stores
from stampede.data import DataError
from stampede.data.raw.files import expand, read_blocks
from support.object_store import BUCKET, between, object_store


@pytest.fixture
def store(tmp_path):
    with object_store(tmp_path / "stores") as files:
        yield files


def put(store, **content):
    for name, text in content.items():
        store.pipe_file(f"{BUCKET}/logs/{name}.csv", text.encode())


def lines(url):
    return b"".join(block.data for file in expand(url) for block in read_blocks(file))


def test_a_log_is_read_where_it_lies(store, tmp_path):
    put(store, day_10="c\n3\n", day_2="c\n1\n2\n")
    assert [file.name for file in expand(f"{BUCKET}/logs/*.csv")] == ["day_2.csv", "day_10.csv"]
    assert lines(f"{BUCKET}/logs/*.csv") == b"c\n1\n2\nc\n3\n"
    # A file that comes while the process runs, as `stampede incremental --follow` needs it.
    put(store, day_11="c\n4\n")
    assert len(expand(f"{BUCKET}/logs/*.csv")) == 3
    assert not (tmp_path / "stores").exists()


def test_an_identity_changes_with_the_content(store):
    put(store, day="c\n1\n")
    before = stores.identity(f"{BUCKET}/logs/day.csv")
    assert stores.identity(f"{BUCKET}/logs/day.csv") == before
    put(store, day="c\n2\n")
    assert stores.identity(f"{BUCKET}/logs/day.csv") != before


@pytest.mark.parametrize(
    ("url", "said"),
    [
        (f"{BUCKET}/logs/none.csv", "none.csv: is not there"),
        (f"{BUCKET}/logs", "logs: is a folder; write its files"),
        ("s3://no-such-bucket/a.csv", "a.csv: is not there"),
        (f"{BUCKET}/logs/*.tsv", "*.tsv: no such file or glob; write the URL"),
        ("ftp://host/a.csv", "an unknown kind of store; write one of s3://"),
        ("s3://key:secret@clicks/a.csv", "s3://clicks/a.csv: write the credentials into the env"),
    ],
)
def test_what_is_not_there_is_named(store, url, said):
    put(store, day="c\n1\n")
    with pytest.raises(DataError) as failure:
        expand(url)
    assert said in str(failure.value) and "secret" not in str(failure.value)


@pytest.mark.parametrize(
    ("url", "given", "found"),
    [
        ("runs/a", "runs/a", False),
        ("file:///runs/a", "/runs/a", False),
        ("s3://b/runs/a", "PLACE/s3/b/runs/a", True),
        ("gs://b//runs/", "PLACE/gs/b/runs", True),
    ],
)
def test_urls_and_their_local_folders(monkeypatch, url, given, found):
    monkeypatch.setenv("STAMPEDE_STORES", "PLACE")
    assert stores.is_url(url) is found
    assert str(stores.local(url)) == given


def test_a_url_cannot_lead_out_of_the_local_folder():
    with pytest.raises(stores.StoreError, match=r"without \. and \.\."):
        stores.local("s3://bucket/../../home")


def folder_there(store, url):
    store.invalidate_cache()
    prefix = url.removeprefix("s3://") + "/"
    return {name.removeprefix(prefix): store.cat_file(name) for name in store.find(url)}


def write(folder, **content):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in content.items():
        (folder / f"{name}.json").write_text(text)


def test_a_folder_is_copied_there_and_back(store, tmp_path, monkeypatch):
    url = f"{BUCKET}/runs/a"
    here = stores.local(url)
    write(here, manifest="1", a="x", b="y")
    write(here / "deeper", c="z")
    (here / ".unfinished.tmp").write_text("no")
    stores.published(url)
    there = folder_there(store, url)
    assert there == {"manifest.json": b"1", "a.json": b"x", "b.json": b"y", "deeper/c.json": b"z"}
    # Another machine.
    monkeypatch.setenv("STAMPEDE_STORES", str(tmp_path / "other"))
    copy = stores.fetched(url)
    assert {str(f.relative_to(copy)): f.read_bytes() for f in copy.rglob("*.json")} == there
    # What changed and what went, in both directions; the rest is not copied again.
    before = (copy / "b.json").stat().st_mtime_ns
    (copy / "a.json").write_text("new")
    (copy / "deeper/c.json").unlink()
    stores.published(url)
    assert folder_there(store, url) == {"manifest.json": b"1", "a.json": b"new", "b.json": b"y"}
    assert stores.fetched(url) == copy and (copy / "b.json").stat().st_mtime_ns == before
    monkeypatch.setenv("STAMPEDE_STORES", str(tmp_path / "stores"))
    assert not (stores.fetched(url) / "deeper/c.json").exists()
    assert (here / "a.json").read_text() == "new"


def test_what_was_written_here_and_never_copied_does_not_count(store):
    url = f"{BUCKET}/runs/a"
    write(stores.local(url), a="left by a run that was killed")
    assert not stores.fetched(url, may_be_absent=True).exists()
    with pytest.raises(stores.StoreError, match="runs/a: is not there"):
        stores.fetched(url)


def test_the_manifest_comes_last_and_goes_first(store):
    """Whenever it is there, all that it lists is, too: seen from the requests themselves."""
    url = f"{BUCKET}/runs/a"
    asked = []
    with between(lambda method, path: asked.append((method, path.partition("?")[0])) and None):
        write(stores.local(url), manifest="1", a="x", z="y")
        stores.published(url)
        for file in stores.local(url).iterdir():
            file.unlink()
        stores.published(url)
    changed = [(method, path[-6:]) for method, path in asked if method in ("PUT", "DELETE")]
    assert changed[2] == ("PUT", "t.json") and changed[3] == ("DELETE", "t.json")
    assert len(changed) == 6


KILLED = """
import os, sys, threading
from stampede import stores
threading.Timer(float(sys.argv[2]), lambda: os.kill(os.getpid(), 9)).start()
stores.published(sys.argv[1])
"""


@pytest.mark.slow
def test_killed_while_it_is_copied(store):
    url = f"{BUCKET}/runs/a"
    here = stores.local(url)
    write(here, manifest="1", **{f"part{number}": "x" * 1000 for number in range(300)})
    seen = set()
    for seconds in (0.5, 0.8, 1.2, 1.7):
        subprocess.run([sys.executable, "-c", KILLED, url, str(seconds)], check=False)
        there = folder_there(store, url)
        seen.add(len(there))
        assert "manifest.json" not in there or len(there) == 301
    stores.published(url)
    assert len(folder_there(store, url)) == 301
    assert len(seen) > 1


def test_a_store_that_fails_for_a_while_is_asked_again(store):
    put(store, day="c\n1\n")
    left = {"GET": 2}

    def answer(method, path):
        if "day.csv" in path and left.get(method, 0):
            left[method] -= 1
            return 503, None
        return None

    with between(answer):
        assert lines(f"{BUCKET}/logs/day.csv") == b"c\n1\n"
    assert not left["GET"]


def test_a_connection_that_is_cut_is_opened_again(store):
    put(store, day="c\n" + "1\n" * 5000)
    left = [2]

    def answer(method, path):
        if method == "GET" and "day.csv" in path and left[0]:
            left[0] -= 1
            return 206, 3000
        return None

    with between(answer):
        assert lines(f"{BUCKET}/logs/day.csv") == b"c\n" + b"1\n" * 5000
    assert left == [0]


@pytest.mark.parametrize(("status", "said"), [(403, "access is refused"), (404, "is not there")])
def test_a_key_that_goes_or_is_closed_ends_with_its_url(store, status, said):
    put(store, day="c\n1\n")

    def answer(method, path):
        return (status, None) if method == "GET" and "day.csv" in path else None

    with between(answer), pytest.raises(DataError) as failure:
        lines(f"{BUCKET}/logs/day.csv")
    assert str(failure.value).startswith(f"{BUCKET}/logs/day.csv: {said}")
    assert "a-secret" not in str(failure.value)


def test_without_the_driver_its_name_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(stores.StoreError, match="pip install universal_pathlib gcsfs"):
        stores.matches("gs://bucket/a.csv")


HOLDS = """
import sys, time
from stampede import stores
stores.Lease.SECONDS = 0.2
lease = stores.Lease(sys.argv[1])
print("taken", flush=True)
time.sleep(600)
"""


def holder(url):
    program = [sys.executable, "-c", HOLDS, url]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "taken\n"
    return process


def test_two_processes_cannot_write_one_url(store, monkeypatch):
    monkeypatch.setattr(stores.Lease, "SECONDS", 1.0)
    with holder(f"{BUCKET}/runs/a") as process:
        with pytest.raises(stores.StoreError, match=f"is being written by process {process.pid}"):
            stores.Lease(f"{BUCKET}/runs/a")
        stores.Lease(f"{BUCKET}/runs/b").release()
        process.kill()
    # The process is known to have ended, as it was on this machine.
    started = time.monotonic()
    stores.Lease(f"{BUCKET}/runs/a").release()
    assert time.monotonic() - started < 2.5
    assert not store.exists(f"{BUCKET}/runs/.a.lease")


def test_the_lease_of_a_lost_host_is_taken_over(store, monkeypatch):
    monkeypatch.setattr(stores.Lease, "SECONDS", 0.2)
    store.pipe_file(f"{BUCKET}/runs/.a.lease", b'{"host": "gone", "process": 7, "beat": 3}')
    stores.Lease(f"{BUCKET}/runs/a").release()


def test_an_output_that_is_there_is_not_replaced_unasked(store):
    url = f"{BUCKET}/scores.csv"
    for overwrite, text in ((False, "1"), (True, "2")):
        with stores.outgoing(url, overwrite) as path:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    assert store.cat_file(url) == b"2"
    with pytest.raises(stores.StoreError) as failure, stores.outgoing(url, overwrite=False):
        pass
    assert failure.value.errno == errno.EEXIST
    with pytest.raises(ZeroDivisionError), stores.outgoing(url, overwrite=True) as path:
        path.write_text("3")
        1 / 0  # noqa: B018
    assert store.cat_file(url) == b"2"
    assert os.path.exists(path)
