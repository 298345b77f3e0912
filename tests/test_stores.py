"""Files and folders of an object store: what arrives here, what is copied there, what is said."""

import errno
import itertools
import os
import shutil
import socket
import subprocess
import sys
import threading

import pytest

from stampede import store_access, stores
from stampede.data import DataError
from stampede.data.raw.files import expand, read_blocks
from stampede.stores import continued
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
    for pattern in ("logs/*.csv", "logs/**.csv", "**/*.csv"):
        assert lines(f"{BUCKET}/{pattern}") == b"c\n1\n2\nc\n3\n"
    # Spark's marks are no logs.
    store.pipe_file(f"{BUCKET}/logs/_SUCCESS", b"")
    store.pipe_file(f"{BUCKET}/logs/_temporary/day_3.csv", b"c\n9\n")
    for pattern in ("logs/*", "**/*.csv"):
        found = [file.name for file in expand(f"{BUCKET}/{pattern}")]
        assert found == ["day_2.csv", "day_10.csv"]
    assert [file.name for file in expand(f"{BUCKET}/logs/_S*")] == ["_SUCCESS"]
    # A file that comes while the process runs, as `stampede incremental --follow` needs it.
    put(store, day_11="c\n4\n")
    assert len(expand(f"{BUCKET}/logs/*.csv")) == 3
    assert not (tmp_path / "stores").exists()


REFUSED = {
    f"{BUCKET}/logs/none.csv": "none.csv: is not there",
    f"{BUCKET}/logs": "logs: is a folder; write its files",
    f"{BUCKET}/logs/a::b.csv": "logs/a::b.csv: a name with :: cannot be read; rename it",
    "s3://no-such-bucket/a.csv": "a.csv: is not there",
    f"{BUCKET}/logs/*.tsv": "*.tsv: no such file or glob; write the URL",
    "ftp://host/a.csv": "an unknown kind of store; write one of s3://",
    "s3://key:se/cret@clicks/a.csv": "s3://...@clicks/a.csv: write the credentials",
    "abfs://clicks/a.csv?sv=1&sig=secret": "abfs://clicks/a.csv?...: write the credentials",
    "s3://key:123/secret@clicks/a.csv?sig=secret": "s3://...@clicks/a.csv: write the cred",
    "s3://key:secret?0@clicks/a.csv": "s3://...: write the credentials",
    "ftp://me:secret@host/a.csv": "ftp://...@host/a.csv: write the credentials",
    "s3://key:secret@clicks/a.csv": "s3://...@clicks/a.csv: write the credentials into the env",
}


@pytest.mark.slow
def test_what_is_not_there_is_named(store):
    put(store, day="c\n1\n")
    for url, said in REFUSED.items():
        with pytest.raises(DataError) as failure:
            expand(url)
        assert said in str(failure.value) and "secret" not in str(failure.value), url


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


def test_what_is_not_there_cannot_be_fetched(store):
    url = f"{BUCKET}/runs/a"
    write(stores.local(url), a="left by somebody")
    with pytest.raises(stores.StoreError, match="runs/a: is not there"):
        stores.fetched(url)


def test_a_reader_does_not_change_the_folder_of_a_run(store):
    url = f"{BUCKET}/runs/a"
    here = stores.working(url)
    write(here, a="1")
    stores.published(url, here)
    write(here, a="2", b="new")
    assert (stores.fetched(url) / "a.json").read_text() == "1"
    assert (here / "a.json").read_text() == "2" and (here / "b.json").exists()


@pytest.mark.slow
def test_an_interrupted_copy_deletes_nothing_there(store, tmp_path, monkeypatch):
    url = f"{BUCKET}/runs/a"
    here = stores.working(url)
    write(here, a="1", b="2", c="3")
    stores.published(url, here)
    # Somebody has deleted the folder, but not what is known of it.
    shutil.rmtree(here)
    stores.published(url, here)
    refuse = []

    def answer(method, path):
        return (403, None) if method == "GET" and path.endswith("b.json") and refuse else None

    with between(answer):
        refuse.append(True)
        with pytest.raises(stores.StoreError, match="access is refused"):
            stores.taken_up(url, here)
    assert set(folder_there(store, url)) == {"a.json", "b.json", "c.json"}
    stores.taken_up(url, here)
    assert sorted(file.name for file in here.iterdir()) == ["a.json", "b.json", "c.json"]


def test_a_run_goes_on_with_what_could_not_be_copied(store, tmp_path, monkeypatch, capsys):
    url = f"{BUCKET}/runs/a"
    here = stores.working(url)
    write(here, a="1")
    # Before the first copy, and after one.
    stores.taken_up(url, here)
    assert (here / "a.json").exists()
    stores.published(url, here)
    write(here, a="2", b="new")
    stores.taken_up(url, here)
    assert (here / "a.json").read_text() == "2" and (here / "b.json").exists()
    # Another machine goes on with what is there.
    monkeypatch.setenv("STAMPEDE_STORES", str(tmp_path / "other"))
    stores.taken_up(url, stores.working(url))
    write(stores.working(url), a="3")
    stores.published(url, stores.working(url))
    monkeypatch.undo()
    monkeypatch.setenv("STAMPEDE_STORES", str(tmp_path / "stores"))
    stores.taken_up(url, here)
    assert (here / "a.json").read_text() == "3" and not (here / "b.json").exists()
    aside = here.with_name(".a.set_aside")
    assert (aside / "b.json").read_text() == "new" and str(aside) in capsys.readouterr().out


def test_a_run_that_was_killed_in_its_first_copy_goes_on(store, tmp_path, monkeypatch):
    url, name = f"{BUCKET}/runs/ads", "checkpoints/epoch_0001/a.distcp"
    here = stores.working(url)
    (here / name).parent.mkdir(parents=True)
    for one, content in {name: "rows", "metrics.jsonl": "1\n2\n"}.items():
        (here / one).write_text(content)
    (here / "checkpoints/epoch_0001/manifest.json").write_text("{}")
    # Lines were added after a part was copied, of which nothing was noted.
    store.pipe_file(f"{url}/{name}", b"rows")
    store.pipe_file(f"{url}/metrics.jsonl", b"1\n")
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("STAMPEDE_STORES", str(tmp_path / "other"))
        stores.taken_up(url, stores.working(url))
        assert not (stores.working(url) / "checkpoints").exists()
    stores.taken_up(url, here)
    assert (here / "metrics.jsonl").read_text() == "1\n2\n" and (here / name).exists()
    stores.published(url, here)
    assert store.cat_file(f"{url}/metrics.jsonl") == b"1\n2\n"
    assert store.exists(f"{url}/checkpoints/epoch_0001/manifest.json")


def test_what_will_be_replaced_is_not_taken_up(store):
    url = f"{BUCKET}/runs/a"
    here = stores.working(url)
    write(here, old="1")
    stores.published(url, here)
    stores.forgotten(url, here)
    write(here, new="2")
    assert set(folder_there(store, url)) == {"old.json"}
    stores.taken_up(url, here)
    assert [file.name for file in here.iterdir()] == ["new.json"]
    stores.published(url, here)
    assert set(folder_there(store, url)) == {"new.json"}


def test_a_manifest_vouches_for_nothing_while_its_folder_changes(store):
    """Seen from the requests: it goes before its files change, and what says "done" comes last."""
    url = f"{BUCKET}/runs/a"
    asked = []
    with between(lambda method, path: asked.append((method, path.partition("?")[0])) and None):
        write(stores.local(url) / "checkpoints/epoch_1", manifest="1", a="x", b="y")
        write(stores.local(url), summary="1", metrics="1")
        stores.published(url)
        write(stores.local(url) / "checkpoints/epoch_1", a="changed")
        (stores.local(url) / "checkpoints/epoch_1/b.json").unlink()
        asked.clear()
        stores.published(url)
    changed = [
        (method, path.rpartition("/")[2]) for method, path in asked if method in ("PUT", "DELETE")
    ]
    assert sorted(changed[:2]) == [("DELETE", "manifest.json"), ("DELETE", "summary.json")]
    assert changed[2] == ("DELETE", "b.json")
    assert [name for _, name in changed[3:]] == ["a.json", "manifest.json", "summary.json"]


def test_keys_that_lead_elsewhere_are_left_alone(store, tmp_path):
    url = f"{BUCKET}/runs/a"
    put(store, day="c\n")
    store.pipe_file(f"{url}/a.json", b"1")
    store.pipe_file(f"{url}/.hidden", b"1")
    found = {"clicks/runs/a/../../../../../escaped": {"size": 1, "name": "x", "type": "file"}}
    real = type(store).find

    def find(self, path, **options):
        return {**real(self, path, **options), **found}

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(type(store), "find", find)
        copy = stores.fetched(url)
    assert [file.name for file in copy.iterdir()] == ["a.json"]
    assert not list(tmp_path.rglob("escaped"))


def test_empty_keys_of_folders_are_no_files(store, tmp_path):
    """As the console of S3 and Hadoop write them."""

    def put_folder(key):
        # The driver takes the slash away.
        store.call_s3("put_object", Bucket="clicks", Key=key, Body=b"")

    url = f"{BUCKET}/runs/a"
    for key in ("runs/a/", "runs/a/sub/", "runs/a/empty/"):
        put_folder(key)
    assert not stores.exists(url)
    stores.taken_up(url, stores.working(url))
    with pytest.raises(stores.StoreError, match="is not there"):
        stores.fetched(url)
    for text in ("one", "two"):
        with stores.outgoing(url, overwrite=text == "two") as folder:
            write(folder / "sub", a=text)
        assert stores.exists(url)
        assert (stores.fetched(url) / "sub/a.json").read_text() == text
    put_folder("out.csv/")
    with stores.outgoing(f"{BUCKET}/out.csv", overwrite=False) as file:
        file.write_text("1")
    assert stores.fetched(f"{BUCKET}/out.csv").read_text() == "1"


def test_what_is_copied_anew_where_it_is_not_there(store):
    url = f"{BUCKET}/cache/a"
    write(stores.local(url), manifest="1", a="x", b="y")
    stores.published(url)
    store.rm_file(f"{url}/manifest.json")
    store.rm_file(f"{url}/a.json")
    store.pipe_file(f"{url}/b.json", b"other")
    stores.published(url)
    assert set(folder_there(store, url)) == {"b.json"}
    stores.published(url, anew=True)
    assert folder_there(store, url) == {"manifest.json": b"1", "a.json": b"x", "b.json": b"y"}


def test_a_full_disk_here_is_no_fault_of_the_store(store, monkeypatch):
    url = f"{BUCKET}/runs/a"
    store.pipe_file(f"{url}/a.json", b"1")

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(store, "get_file", full)
    with pytest.raises(stores.StoreError, match=r"its copy in .* cannot be written") as failure:
        stores.fetched(url)
    assert failure.value.errno == errno.ENOSPC


@pytest.mark.wide
def test_killed_while_it_is_copied(store):
    url = f"{BUCKET}/runs/a"
    here = stores.local(url)
    write(here, manifest="1", **{f"part{number}": "x" * 1000 for number in range(300)})
    program = "import sys; from stampede import stores; stores.published(sys.argv[1])"
    for least in (1, 40, 120):
        with subprocess.Popen([sys.executable, "-c", program, url]) as copying:
            while len(store.glob(f"{url}/*")) < least and copying.poll() is None:
                store.invalidate_cache()
            copying.kill()
        there = folder_there(store, url)
        assert "manifest.json" not in there or len(there) == 301
        assert len(there) >= least
    stores.published(url)
    assert len(folder_there(store, url)) == 301


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.wide
@pytest.mark.parametrize(("status", "said"), [(403, "access is refused"), (404, "is not there")])
def test_a_key_that_goes_or_is_closed_ends_with_its_url(store, status, said):
    put(store, day="c\n1\n")

    def answer(method, path):
        return (status, None) if method == "GET" and "day.csv" in path else None

    with between(answer), pytest.raises(DataError) as failure:
        lines(f"{BUCKET}/logs/day.csv")
    assert str(failure.value).startswith(f"{BUCKET}/logs/day.csv: {said}")
    assert "a-secret" not in str(failure.value)


@pytest.mark.parametrize(
    ("kind", "driver", "module"),
    [
        ("gs", "gcsfs", "gcsfs"),
        ("abfs", "adlfs", "adlfs"),
        ("hdfs", "hdfs-native", "hdfs_native.fsspec"),
    ],
)
def test_without_the_driver_its_name_is_said(monkeypatch, kind, driver, module):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "stampede.hdfs", raising=False)
    # Another test may have used it.
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, kind, raising=False)
    with pytest.raises(stores.StoreError, match=f"pip install {driver}"):
        stores.matches(f"{kind}://bucket/a.csv")


@pytest.mark.parametrize(("files", "parts"), [(1, 8), (3, 2), (20, 1)])
def test_many_large_files_have_fewer_parts_at_once(store, monkeypatch, tmp_path, files, parts):
    url = f"{BUCKET}/runs/a"
    monkeypatch.setattr("stampede.store_copies.PART_BYTES", 3)
    write(stores.local(url), small="1", **{f"large{number}": "1234" for number in range(files)})
    found = []
    for name in ("put_file", "get_file"):
        real = getattr(store, name)

        def copied(*given, real=real, **options):
            found.append((options["max_concurrency"], options["chunksize"]))
            return real(*given, **options)

        monkeypatch.setattr(store, name, copied)
    stores.published(url)
    monkeypatch.setenv("STAMPEDE_STORES", str(tmp_path / "other"))
    stores.fetched(url)
    assert found == [(parts, 16 << 20)] * 2 * (files + 1)


def test_who_may_write_no_more_stops_within_a_copy(store, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("a", "b", "manifest.json"):
        (folder / name).write_text(name)
    turns = itertools.count()

    def check():
        if next(turns):
            raise stores.StoreError(errno.EBUSY, "was taken over", f"{BUCKET}/run")

    with pytest.raises(stores.StoreError, match="was taken over"):
        stores.published(f"{BUCKET}/run", folder, check)
    assert len(store.find(f"{BUCKET}/run")) == 1


def test_an_output_whose_copy_was_cut_off_is_written_anew(store):
    url = f"{BUCKET}/prepared"

    def write(text):
        with stores.outgoing(url, overwrite=False) as folder:
            assert not folder.exists()
            folder.mkdir(parents=True)
            (folder / "rows").write_text(text)
            (folder / "manifest.json").write_text("{}")

    write("one")
    store.rm_file(f"{url}/manifest.json")
    write("two")
    assert store.cat_file(f"{url}/rows") == b"two"
    with pytest.raises(stores.StoreError, match="is already there"):
        write("three")
    # What somebody else has put there is left alone.
    store.rm_file(f"{url}/manifest.json")
    store.pipe_file(f"{url}/other", b"0")
    with pytest.raises(stores.StoreError, match="is already there; write another"):
        write("four")


def test_an_output_is_not_fetched_while_it_is_written(store):
    for name in ("scores.csv", "package"):
        url = f"{BUCKET}/{name}"
        store.pipe_file(url if name == "scores.csv" else f"{url}/a.json", b"old")
        with stores.outgoing(url, overwrite=True) as out:
            file = out if name == "scores.csv" else out / "a.json"
            file.write_text("new")
            for action in (
                lambda url=url: stores.fetched(url),
                lambda url=url: stores.outgoing(url, overwrite=True).__enter__(),
            ):
                with pytest.raises(stores.StoreError, match=f"{name}: is being written by anoth"):
                    action()
        copy = stores.fetched(url)
        assert (copy if copy.is_file() else copy / "a.json").read_text() == "new"
        with pytest.raises(ZeroDivisionError), stores.outgoing(url, overwrite=True):
            1 / 0  # noqa: B018
        stores.fetched(url)


def test_an_output_leaves_what_others_wrote_below_it(store):
    url = f"{BUCKET}/out"
    with stores.outgoing(f"{url}/scores.parquet", overwrite=False) as file:
        file.write_text("scores")
    with (
        pytest.raises(stores.StoreError, match="is already there"),
        stores.outgoing(url, overwrite=False),
    ):
        pass
    for text in ("one", "two"):
        with stores.outgoing(url, overwrite=True) as folder:
            (folder / "page.html").write_text(text)
        assert store.cat_file(f"{url}/page.html") == text.encode()
        assert store.cat_file(f"{url}/scores.parquet") == b"scores"


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


def test_a_name_node_that_is_silent_is_not_waited_for_without_end(monkeypatch, tmp_path):
    pytest.importorskip("hdfs_native", reason="no hdfs-native: pip install -e '.[hdfs]'")
    monkeypatch.setattr("stampede.hdfs._SECONDS", 0.1)
    monkeypatch.setenv("STAMPEDE_STORES", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"hdfs://127.0.0.1:{silent.getsockname()[1]}/a.csv"
        reason = r"the store cannot be used \(it has not answered for 0 s\); check its address"
        for action in (
            stores.matches,
            stores.fetched,
            stores.read_object,
            stores.delete_object,
            lambda url: store_access.replace_object(url, b"1", None),
        ):
            with pytest.raises(stores.StoreError, match=f"^{url}: {reason}"):
                action(url)


@pytest.mark.parametrize("url", ["s3://somebody:secret@clicks/x", "s3://clicks/../x"])
def test_a_url_that_is_refused_leaves_no_lease_and_shows_no_password(url):
    with pytest.raises(stores.StoreError) as failure, continued(url):
        pass
    assert "secret" not in str(failure.value) and not any(
        "_keep" in thread.name for thread in threading.enumerate()
    )
