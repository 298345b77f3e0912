"""S3, Google Cloud Storage, Azure and HDFS: a job, and what is said of what is wrong there."""

import errno
import gzip
import re

import numpy as np
import polars as pl
import pytest

import stampede
from stampede import stores
from stampede.data import DataError
from stampede.data.prepare_command import main as prepare
from stampede.data.raw.files import expand, read_blocks
from stampede.engine.checkpoint.retention import newest
from stampede.engine.cli import stampede as command
from stampede.engine.config.load import load_config
from stampede.engine.inference import export_command, predict_command
from stampede.engine.run import run
from stampede.lease import Lease
from stampede.store_access import replace_object, seen_object
from support import periods
from support.hadoop import hdfs_store
from support.jobs import lines, tensors_of
from support.movie_runs import JOB, ROWS, prepare_movies, rows_of_test_part, train_on_movies
from support.movies import movies, write_movies
from support.object_store import BUCKET as S3
from support.object_store import object_store
from support.other_stores import AZURE, GOOGLE, azure_account, azure_store, google_store
from support.packages import loaded

pytestmark = pytest.mark.slow

HDFS = "hdfs"
OF_HDFS = pytest.mark.parametrize("store", [HDFS], indirect=True)
SERVERS = {
    S3: object_store,
    HDFS: hdfs_store,
    GOOGLE: lambda folder: google_store(),
    AZURE: azure_store,
}


@pytest.fixture(scope="module", params=SERVERS)
def store(request, tmp_path_factory):
    with SERVERS[request.param](tmp_path_factory.mktemp("server")) as files:
        files.kind = request.param
        if request.param != HDFS:
            files.bucket = request.param
        yield files


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    """Go to another machine."""

    def go(name):
        monkeypatch.setenv("STAMPEDE_STORES", str(tmp_path / name))

    go("first")
    return go


def assert_same(run_folder, expected):
    found, wanted = (tensors_of(newest(one / "checkpoints")) for one in (run_folder, expected))
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        np.testing.assert_array_equal(found[name], values)


def put_log(store, folder):
    """The log of `prepare_movies` and its schema in the store, beside those here."""
    prepare_movies(folder)
    write_movies(folder / "log.csv.gz", movies(ROWS))
    write_movies(folder / "log.parquet", movies(ROWS))
    given = f"{store.bucket}/given"
    for name in ("log.csv.gz", "log.parquet", "schema.yaml"):
        store.put_file(str(folder / name), f"{given}/{name}")
    return given


def train(store, folder, *overrides):
    """As the launcher does it; the run's URL."""
    job = [one for one in JOB if not one.startswith("data.")]
    config = load_config(
        folder / "movies.yaml", [*job, f"run.dir={store.bucket}/runs", *overrides], 1
    )
    run(config)
    return f"{store.bucket}/runs/{config.run.name}"


@pytest.mark.cases(2)
def test_a_job(store, machine, tmp_path):
    given = put_log(store, tmp_path / "here")
    here = train_on_movies(tmp_path / "here", "train.epochs=2")
    table = ["data.kind=table", f"data.schema_file={given}/schema.yaml"]
    table += [f"data.cache={store.bucket}/cache", "data.validation_fraction=0.2"]
    url = train(store, tmp_path / "here", f"data.path={given}/log.parquet", *table)
    # Continued on a machine that has nothing of it, from the text.
    machine("second")
    text = [f"data.path={given}/log.csv.gz", *table, "train.epochs=2"]
    assert train(store, tmp_path / "here", *text, "checkpoint.resume=auto") == url
    assert_same(stores.working(url), here)
    with pytest.raises(stampede.RunFolderError, match="movies exists; write run"):
        train(store, tmp_path / "here", *text)
    # What reads a run.
    machine("third")
    rows = rows_of_test_part()
    scores = stampede.open_run(here).score(rows)
    np.testing.assert_array_equal(stampede.open_run(url).score(rows), scores)
    scored = f"{store.bucket}/scores.parquet"
    assert predict_command.main([url, f"{given}/log.csv.gz", scored]) == 0
    assert predict_command.main([url, f"{given}/log.csv.gz", scored]) == 2
    with store.open(scored) as file:
        found = pl.read_parquet(file.read())["score"]
    np.testing.assert_allclose(found[-len(rows) :], scores, rtol=1e-6)
    assert export_command.main([url, f"{store.bucket}/package"]) == 0
    package = loaded(
        stampede.open_run(here).export(tmp_path / "package"), f"{store.bucket}/package"
    )
    np.testing.assert_array_equal(package.score(rows), scores)


@pytest.mark.wide
def test_the_test_part_in_files_of_its_own(store, machine, tmp_path):
    put_log(store, tmp_path / "here")
    split, log = ["data.split=files", "data.kind=table"], movies(ROWS)
    parts = {"path": log[:400], "validation_path": log[400:500], "test_path": log[500:]}
    here, there = [], [f"data.schema_file={store.bucket}/given/schema.yaml"]
    for name, rows in parts.items():
        file = tmp_path / "here" / f"{name}.csv"
        write_movies(file, rows)
        store.put_file(str(file), f"{store.bucket}/given/{file.name}")
        here.append(f"data.{name}={file}")
        there.append(f"data.{name}={store.bucket}/given/{file.name}")
    cache = f"data.cache={store.bucket}/cache_of_files"
    expected = train_on_movies(tmp_path / "here", *split, "data.validation_fraction=0.1", *here)
    url = train(store, tmp_path / "here", *split, *there, cache, "run.name=of_files")
    assert_same(stores.working(url), expected)
    found, wanted = (
        [one for one in lines(folder) if one.get("part") == "test"]
        for folder in (stores.working(url), expected)
    )
    assert found[-1]["auc"] == wanted[-1]["auc"] and found[-1]["logloss"] == wanted[-1]["logloss"]
    # Also as a glob; a file that is not there is named.
    globs = [one.replace("test_path.csv", "test_p*.csv") for one in there]
    url = train(store, tmp_path / "here", *split, *globs, cache, "run.name=of_globs")
    assert_same(stores.working(url), expected)
    missing = f"{store.bucket}/given/none.csv"
    none = f"data.test_path={missing}", "run.name=of_none"
    with pytest.raises((DataError, OSError), match=missing):
        train(store, tmp_path / "here", *split, *there, cache, *none)


@pytest.mark.wide
def test_other_commands(store, machine, tmp_path):
    given, out = put_log(store, tmp_path / "here"), f"{store.bucket}/commands"
    here = train_on_movies(tmp_path / "here")
    # Prepared data, as a copy and streamed.
    options = ["--schema", f"{given}/schema.yaml", "-s", "validation_fraction=0.2"]
    options += ["-s", "features=paper", "--out", f"{out}/prepared"]
    assert prepare(["table", f"{given}/log.csv.gz", *options]) == 0
    prepared = ["data.kind=prepared", f"data.path={out}/prepared"]
    url = train(store, tmp_path / "here", *prepared, "run.name=prepared")
    assert_same(stores.working(url), here)
    train(store, tmp_path / "here", *prepared, "run.name=streamed", "data.cache_gb=1e-5")
    machine("second")
    bad = tmp_path / "bad.csv.gz"
    bad.write_bytes((tmp_path / "here/log.csv.gz").read_bytes() + gzip.compress(b"too,few\n"))
    store.put_file(str(bad), f"{given}/bad.csv.gz")
    skipping = ["--on-bad-row", "skip", "--overwrite"]
    for rows, is_bad in (("bad.csv.gz", True), ("log.csv.gz", False)):
        assert predict_command.main([url, f"{given}/{rows}", f"{out}/some.csv", *skipping]) == 0
        assert stores.exists(f"{out}/some.bad_rows.jsonl") == is_bad
    for _ in range(2):
        assert export_command.main([url, f"{out}/package", "--overwrite"]) == 0
    assert command(["importance", url]) == 2
    assert command(["importance", url, "--rows=100", "--out", f"{out}/importance"]) == 0
    assert command(["describe", f"{given}/log.csv.gz", "--out", f"{out}/described"]) == 0
    assert stores.exists(f"{out}/described/schema.yaml")
    assert command(["report", url, "--out", f"{out}/report"]) == 0
    assert stores.exists(f"{out}/report/report.html")


@pytest.mark.wide
def test_searches_and_sweeps_go_on_elsewhere(store, machine, tmp_path):
    given, out = put_log(store, tmp_path / "job"), f"{store.bucket}/tried"
    job = [one for one in JOB if not one.startswith("data.path")]
    job += [f"data.path={given}/log.parquet", f"data.schema_file={given}/schema.yaml"]
    job += [f"data.cache={store.bucket}/cache"]
    base = str(tmp_path / "job/movies.yaml")
    grid = tmp_path / "job/grid.yaml"
    grid.write_text("config: movies.yaml\ngrid: {model.name: [lr, fm]}\n")
    commands = {
        "tuned/tuned.yaml": ["tune", base, *job, "--minutes", "0", "--out", f"{out}/tuned"],
        "swept/results.csv": ["sweep", str(grid), *job, "--out", f"{out}/swept"],
    }
    for result, given_command in commands.items():
        found = []
        for name in ("first", "second"):
            machine(name)
            store.invalidate_cache()
            assert command(given_command) == 0
            found.append(stores.read_object(f"{out}/{result}"))
        # Nothing was trained again, or its seconds would differ.
        assert found[0] == found[1] and found[0]


@pytest.mark.cases(1)
def test_days(store, machine, tmp_path):
    path = periods.write_job(tmp_path / "job")
    days = f"{store.bucket}/days"
    job = [f"data.path={days}/log*.csv", f"run.dir={store.bucket}/runs_of_days"]

    def arrives(day):
        file = tmp_path / f"job/log_{day}.csv"
        periods.write_log(file, day, seed=day)
        store.put_file(str(file), f"{days}/{file.name}")
        store.invalidate_cache()

    arrives(1)
    arrives(2)
    periods.train(path, job)
    # The next day comes to another machine.
    machine("second")
    arrives(3)
    periods.train(path, job)
    periods.train(path)
    url = f"{store.bucket}/runs_of_days/ads"
    assert_same(stores.working(url) / "period_0003", tmp_path / "job/runs/ads/period_0003")


def test_an_identity_changes_with_the_content(store):
    url = f"{store.bucket}/changes/a"
    seen = set()
    for content in (b"1", b"2", b"22"):
        store.pipe_file(url, content)
        store.invalidate_cache()
        found = {stores.identity(url) for _ in range(2)}
        assert len(found) == 1
        seen |= found
    assert len(seen) == 3


def test_two_runs_cannot_write_one_url(store, monkeypatch):
    monkeypatch.setattr(Lease, "SECONDS", 0.5)
    lease = Lease(f"{store.bucket}/leased/a")
    with pytest.raises(stores.StoreError) as failure:
        replace_object(f"{store.bucket}/leased/.a.lease", b"{}", None)
    assert failure.value.errno == errno.EEXIST
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("stampede.lease._machine", lambda: "another")
        with pytest.raises(stores.StoreError, match="is being written by process"):
            Lease(f"{store.bucket}/leased/a")
    lease.release()
    Lease(f"{store.bucket}/leased/a").release()


def test_what_another_has_replaced_is_not_written(store):
    url = f"{store.bucket}/leased/b"
    assert replace_object(url, b"1", None)
    seen = seen_object(url)
    assert seen[1] == b"1"
    compares = replace_object(url, b"2", seen)
    assert compares == (store.kind != HDFS)
    if compares:
        with pytest.raises(stores.StoreError) as failure:
            replace_object(url, b"3", seen)
        assert failure.value.errno == errno.EEXIST
        assert stores.read_object(url) == b"2"


def said(url):
    """Of a log that cannot be read, in one line."""
    with pytest.raises(DataError) as failure:
        for file in expand(url):
            list(read_blocks(file))
    assert "\n" not in str(failure.value)
    return str(failure.value)


def test_what_is_wrong_is_one_sentence_with_the_url(store, capfd):
    folder = f"{store.bucket}/logs"
    store.pipe_file(f"{folder}/a.csv", b"c\n1\n")
    bucket = store.bucket.replace("clicks", "no-such-bucket")
    assert said(f"{folder}/none.csv") == f"{folder}/none.csv: is not there"
    assert said(f"{bucket}/a.csv") == f"{bucket}/a.csv: is not there"
    assert said(folder).startswith(f"{folder}: is a folder; write its files, such as {folder}/*")
    (file,) = expand(f"{folder}/*")
    store.rm_file(f"{folder}/a.csv")
    # Known before it went, as listings are kept.
    with pytest.raises(DataError, match=r"a\.csv: is not there"):
        list(read_blocks(file))
    assert "Traceback" not in "".join(capfd.readouterr())


def test_a_key_that_goes_while_it_is_read(store):
    if store.kind == HDFS:
        pytest.skip("HDFS keeps the blocks of a deleted file for some seconds")
    url = f"{store.bucket}/logs/long.csv"
    store.pipe_file(url, b"c\n" + b"1\n" * 100_000)
    file = stores.opened(stores.at(url), block_bytes=1000)
    assert file.read(2) == b"c\n"
    store.rm_file(url)
    with pytest.raises(stores.StoreError, match=rf"^{url}: is not there"):
        file.seek(150_000)
        file.read(10)


# The server of S3 takes any.
@pytest.mark.parametrize("store", [GOOGLE, AZURE, HDFS], indirect=True)
def test_wrong_credentials(store, monkeypatch, capfd):
    if store.kind == GOOGLE:
        refused = said(f"{GOOGLE}/refused/a.csv")
    elif store.kind == HDFS:
        store.pipe_file("/clicks/refused/a.csv", b"c\n1\n")
        store.client.set_permission("/clicks/refused", 0o700)
        monkeypatch.setenv("HADOOP_USER_NAME", "somebody")
        type(store).clear_instance_cache()
        refused = said(f"{store.bucket}/refused/a.csv")
        type(store).clear_instance_cache()
    else:
        address, key = store.service_client.url, "YW5vdGhlciBrZXk="
        with azure_account(address.partition("/devstore")[0], key):
            refused = said(f"{AZURE}/refused/a.csv")
        assert key not in refused
    assert refused.startswith(f"{store.bucket}/refused/a.csv: access is refused (")
    assert refused.endswith("); check the credentials") and len(refused) < 300
    assert "Traceback" not in "".join(capfd.readouterr())


def test_files_that_a_glob_finds_keep_the_account(store):
    store.pipe_file(f"{store.bucket}/found/a.csv", b"c\n1\n")
    account = "@devstoreaccount1.dfs.core.windows.net" if store.kind == AZURE else ""
    url = f"{store.bucket}{account}/found"
    (file,) = expand(f"{url}/*.csv")
    assert str(file) == f"{url}/a.csv"
    assert [block.data for block in read_blocks(file)] == [b"c\n1\n"]


@OF_HDFS
def test_a_file_of_hdfs_has_its_name_when_it_is_complete(store, tmp_path, monkeypatch):
    (tmp_path / "new.json").write_bytes(b"new")
    folder = f"{store.bucket}/whole?"
    url, seen = f"{folder}/manifest.json", []

    def copy(here, there, _):
        there.write(b"ne")
        seen.append(stores.read_object(url))
        raise KeyboardInterrupt

    for before in (None, b"old"):
        if before:
            assert replace_object(url, before, None)
        # What a killed process left.
        store.touch(f"{folder}/.manifest.json.copy")
        with monkeypatch.context() as cut, pytest.raises(KeyboardInterrupt):
            cut.setattr("shutil.copyfileobj", copy)
            store.put_file(str(tmp_path / "new.json"), url)
        assert stores.read_object(url) == before
        assert len(store.ls(folder)) == len(seen) - 1
        assert len(stores.matches(f"{folder}/*")) == len(seen) - 1
    assert seen == [None, b"old"]
    store.put_file(str(tmp_path / "new.json"), url)
    assert stores.read_object(url) == b"new"


@OF_HDFS
def test_a_folder_of_hdfs_that_cannot_be_listed_is_not_empty(store, tmp_path, monkeypatch):
    url = f"{store.bucket}/kept"
    with stores.outgoing(f"{url}/run", overwrite=False) as out:
        out.mkdir(parents=True)
        (out / "a.json").write_text("old")
    whole = type(store).ls

    def ls(self, path, *given, **options):
        if path.endswith("/run"):
            raise OSError("Connection reset by peer")
        return whole(self, path, *given, **options)

    monkeypatch.setattr(type(store), "ls", ls)
    for action in (
        lambda: stores.matches(f"{url}/*/*"),
        lambda: stores.fetched(f"{url}/run"),
        lambda: stores.outgoing(f"{url}/run", overwrite=False).__enter__(),
        lambda: stores.taken_up(f"{url}/run", tmp_path / "run"),
    ):
        with pytest.raises(stores.StoreError, match=r"cannot be used .Connection reset"):
            action()


@OF_HDFS
def test_a_range_of_a_file_of_hdfs_is_read_alone(store, monkeypatch):
    url = f"{store.bucket}/ranges"
    store.pipe_file(url, bytes(range(256)))
    read = []
    ahead = "hdfs_native.fsspec.HdfsFileSystem._open"
    monkeypatch.setattr(ahead, lambda *_: read.append(1))
    assert stores.read_range(url, 10, 20) == bytes(range(10, 20))
    assert stores.read_range(url, 250, 300) == bytes(range(250, 256))
    assert stores.read_object(url) == bytes(range(256)) and not read


@OF_HDFS
def test_wrong_addresses_of_hdfs(store):
    path = store.bucket.removeprefix("hdfs://")
    for url, reason in (
        ("hdfs://NoSuchService/a.csv", r"write the port of NoSuchService, or set \$HADOOP_CONF"),
        (f"hdfs://me@{path}/a.csv", r"write the name of the user into \$HADOOP_USER_NAME"),
        (f"HDFS://{path}/a.csv", "an unknown kind of store; write one of s3://"),
    ):
        assert re.search(reason, said(url))
    store.pipe_file("/clicks/twice/a.csv", b"c\n1\n")
    assert [file.name for file in stores.matches(f"{store.bucket}//twice//a.csv")] == ["a.csv"]
