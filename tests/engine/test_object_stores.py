"""A whole job whose log, prepared data, run and results are in an object store."""

import os
import platform
import signal
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from polars.testing import assert_frame_equal
from torch.multiprocessing import ProcessExitedException
from upath import UPath

import stampede
from stampede import stores
from stampede.data.describe import main as describe
from stampede.data.prepare_command import main as prepare
from stampede.engine.config.load import load_config
from stampede.engine.inference import export_command, predict_command
from stampede.engine.run import run
from stampede.lab.report.command import main as report
from stampede.lease import Lease
from support import periods, reading
from support.jobs import tensors_of, without_times
from support.movie_runs import JOB, ROWS, prepare_movies, rows_of_test_part
from support.movies import movies, write_movies
from support.object_store import BUCKET, between, object_store
from support.packages import loaded
from support.ranks import run_ranks

pytestmark = pytest.mark.slow


@pytest.fixture
def store(tmp_path):
    with object_store(tmp_path / "stores") as files:
        yield files


def put_movies(store, folder, form="csv"):
    """The log of `prepare_movies`, and its schema, in the store; overrides of a job on them."""
    prepare_movies(folder)
    if form != "csv":
        write_movies(folder / f"log.{form}", movies(ROWS))
    for name in (f"log.{form}", "schema.yaml"):
        store.put_file(str(folder / name), f"{BUCKET}/given/{name}")
    given = [f"data.path={BUCKET}/given/log.{form}", f"data.schema_file={BUCKET}/given/schema.yaml"]
    return [*given, f"run.dir={BUCKET}/runs", f"data.cache={BUCKET}/cache", *JOB]


def train(folder, overrides, world_size=1):
    """As the launcher does it; also as a rank of several."""
    config = load_config(folder / "movies.yaml", overrides, world_size)
    run(config)
    return stores.working(f"{BUCKET}/runs/{config.run.name}")


def weights(run_folder):
    return tensors_of(sorted((run_folder / "checkpoints").glob("epoch_*"))[-1])


def another_machine(monkeypatch, folder):
    monkeypatch.setenv("STAMPEDE_STORES", str(folder))


def names(store, url):
    store.invalidate_cache()
    return {name.rpartition("/")[2] for name in store.find(url)}


@pytest.mark.wide
def test_commands_read_and_write_there(store, tmp_path, monkeypatch, capsys):
    train(tmp_path / "job", put_movies(store, tmp_path / "job"))
    another_machine(monkeypatch, tmp_path / "other")
    run_url, rows = f"{BUCKET}/runs/movies", f"{BUCKET}/given/log.csv"
    for output in (f"{BUCKET}/out/scores.parquet", str(tmp_path / "scores.parquet")):
        assert predict_command.main([run_url, rows, output]) == 0
    assert f"{BUCKET}/out/scores.parquet" in capsys.readouterr().out
    scores = pl.read_parquet(tmp_path / "scores.parquet")["score"]
    np.testing.assert_allclose(stampede.open_run(run_url).score(UPath(rows)), scores, rtol=1e-6)
    with store.open(f"{BUCKET}/out/scores.parquet") as file:
        assert_frame_equal(
            pl.read_parquet(file.read()), pl.read_parquet(tmp_path / "scores.parquet")
        )
    assert predict_command.main([run_url, rows, f"{BUCKET}/out/scores.parquet"]) == 2
    assert "scores.parquet: is already there" in capsys.readouterr().err
    for arguments in ([], ["--overwrite"]):
        assert export_command.main([run_url, f"{BUCKET}/package", *arguments]) == 0
    assert "load.py" in names(store, f"{BUCKET}/package")
    package, given = stampede.open_run(run_url).export(tmp_path / "package"), rows_of_test_part()
    there = loaded(package, f"{BUCKET}/package")
    np.testing.assert_array_equal(there.score(given), loaded(package).score(given))
    with pytest.raises(ValueError, match=r"^s3://clicks/other: cannot be fetched"):
        loaded(package, f"{BUCKET}/other")
    for url in ("s3://KEY:SE/CRET@clicks/other", "s3://clicks/other?sig=SECRET"):
        with pytest.raises(ValueError, match=r"other.*: write the credentials into") as failure:
            loaded(package, url)
        assert "CRET" not in str(failure.value) and "KEY" not in str(failure.value)
    # A folder that is no package is left alone.
    assert export_command.main([run_url, f"{BUCKET}/given", "--overwrite"]) == 2
    assert names(store, f"{BUCKET}/given") == {"log.csv", "schema.yaml"}
    # A package of there is compared with.
    delta = ["--since", f"{BUCKET}/package"]
    assert export_command.main([run_url, f"{BUCKET}/delta", *delta]) == 0
    out = ["--schema", f"{BUCKET}/given/schema.yaml", "--out", f"{BUCKET}/prepared"]
    assert prepare(["table", rows, *out]) == 0
    assert "manifest.json" in names(store, f"{BUCKET}/prepared")
    assert describe([rows, "--out", f"{BUCKET}/described"]) == 0
    assert "schema.yaml" in names(store, f"{BUCKET}/described")
    assert f"schema is in {BUCKET}/described/schema.yaml" in capsys.readouterr().out
    with store.open(f"{BUCKET}/described/schema.yaml", "ab") as file:
        file.write(b"missing: [none]\n")
    assert describe([rows, "--out", f"{BUCKET}/described"]) == 2
    assert f"{BUCKET}/described/schema.yaml: is not what describe wrote" in capsys.readouterr().err
    with store.open(f"{BUCKET}/log.jsonl", "wb") as file:
        file.write(b'{"label": 0}\n')
    assert describe([f"{BUCKET}/log.jsonl"]) == 2
    assert f'`pl.read_ndjson("{BUCKET}/log.jsonl").write' in capsys.readouterr().err
    # The run's own prepared data by their URL have the scores of `@run`.
    (manifest,) = store.glob(f"{BUCKET}/cache/*/manifest.json")
    own = f"s3://{manifest.rpartition('/')[0]}"
    for given, output in ((own, "own.csv"), ("@run", "same.csv")):
        assert predict_command.main([run_url, given, f"{BUCKET}/out/{output}"]) == 0
    found = [store.cat_file(f"{BUCKET}/out/{name}") for name in ("own.csv", "same.csv")]
    assert found[0] == found[1] and found[0].count(b"\n") > 10
    for _ in range(2):
        assert report([run_url, "--out", f"{BUCKET}/report", "--baseline", run_url]) == 0
    assert f"  report of 1 run: {BUCKET}/report/report.html" in capsys.readouterr().out
    page = store.cat_file(f"{BUCKET}/report/report.html").decode()
    assert "movies" in page and "test AUC" in page


@pytest.mark.wide
def test_prepared_data_that_were_deleted_there_are_copied_again(store, tmp_path):
    job = put_movies(store, tmp_path)
    train(tmp_path, job)
    before = names(store, f"{BUCKET}/cache")
    store.rm(f"{BUCKET}/cache", recursive=True)
    train(tmp_path, [*job, "run.name=again"])
    assert names(store, f"{BUCKET}/cache") == before


@pytest.mark.wide
def test_only_the_wanted_checkpoint_is_fetched(store, tmp_path, monkeypatch):
    train(tmp_path / "job", [*put_movies(store, tmp_path / "job"), "train.epochs=2"])
    another_machine(monkeypatch, tmp_path / "other")
    url, rows = f"{BUCKET}/runs/movies", f"{BUCKET}/given/log.csv"

    def fetched():
        return {file.parent.name for file in stores.local(url).rglob("*.distcp")}

    assert report([url, "--out", str(tmp_path / "report")]) == 0 and not fetched()
    for epoch, held in (("1", {"epoch_0001"}), ("2", {"epoch_0001", "epoch_0002"})):
        output = str(tmp_path / f"{epoch}.csv")
        assert predict_command.main([url, rows, output, "--epoch", epoch]) == 0
        assert fetched() == held
    # What is here stays.
    assert report([url, "--out", str(tmp_path / "report")]) == 0
    assert fetched() == {"epoch_0001", "epoch_0002"}


def train_as_ranks(folder, overrides, world_size, environment):
    # The process that forks the ranks has its own.
    os.environ.update(environment)
    train(folder, overrides, world_size)


def train_as_hosts(folder, overrides, hosts, environment):
    """As ranks of two hosts that share no folder; what the run says and scores there."""
    rank = int(os.environ["RANK"])
    platform.node = lambda: hosts[rank]
    os.environ.update(environment)
    # The same path, but not the same place.
    here = folder / hosts[rank]
    here.mkdir(exist_ok=True)
    os.chdir(here)
    os.environ["STAMPEDE_STORES"] = "stores"
    (here / "movies.yaml").write_text("")
    found = stampede.train(load_config(Path("movies.yaml"), overrides, 2).model_dump(mode="json"))
    return found.metrics["test"], found.score(rows_of_test_part())


@pytest.mark.wide
def test_hosts_without_a_shared_folder(store, tmp_path, monkeypatch):
    job = [*put_movies(store, tmp_path), "sharding.plan=row_wise", "train.epochs=2"]
    ours = {name: os.environ[name] for name in os.environ if name.startswith("AWS_")}
    run_ranks(2, train_as_ranks, tmp_path, [*job, "run.name=shared"], 2, {
        **ours, "STAMPEDE_STORES": str(tmp_path / "stores"),
    })  # fmt: skip
    expected = weights(stores.working(f"{BUCKET}/runs/shared"))
    north, south = ("north", "south"), ("south", "north")

    def train_apart(hosts, *more):
        given = [*job, "run.name=apart", *more]
        found = run_ranks(2, train_as_hosts, tmp_path, given, hosts, ours, ranks_per_node=1)
        for one, other in zip(*found, strict=True):
            np.testing.assert_equal(one, other)
        return found[0]

    train_apart(north, "train.epochs=1")
    # The other one is the host of rank 0 now, and has nothing of the run.
    train_apart(south, "checkpoint.resume=auto")
    another_machine(monkeypatch, tmp_path / "other")
    run_folder = stampede.open_run(f"{BUCKET}/runs/apart").path
    for name, values in weights(run_folder).items():
        np.testing.assert_array_equal(values, expected[name])
    # Weights of another run, which only the host of rank 0 fetches.
    begun = [f"checkpoint.init_from={BUCKET}/runs/shared", "run.name=begun", "train.epochs=1"]
    assert train_apart(north, *begun)[0]["auc"] > 0.3
    assert not [path for path in tmp_path.rglob(".*") if path.suffix == ".copy"]


def train_partly_shared(folder, overrides, environment):
    """As the host of a rank; the last host shares no folder with the others."""
    rank = int(os.environ["RANK"])
    platform.node = lambda: f"host{rank}"
    os.environ |= {**environment, "STAMPEDE_STORES": str(folder / f"stores{rank // 2}")}
    train(folder, overrides, 3)


@pytest.mark.wide
def test_hosts_of_which_two_share_a_folder(store, tmp_path):
    job = [*put_movies(store, tmp_path), "sharding.plan=row_wise"]
    job += ["train.batch_size=63", "evaluate.batch_size=63"]
    ours = {name: os.environ[name] for name in os.environ if name.startswith(("AWS_", "STAMPEDE_"))}
    run_ranks(3, train_as_ranks, tmp_path, [*job, "run.name=shared"], 3, ours)
    run_ranks(3, train_partly_shared, tmp_path, job, ours, ranks_per_node=1)
    expected = weights(stores.working(f"{BUCKET}/runs/shared"))
    found = weights(stampede.open_run(f"{BUCKET}/runs/movies").path)
    assert found.keys() == expected.keys()
    for name, values in found.items():
        np.testing.assert_array_equal(values, expected[name])


def refused_days(path, overrides, environment):
    """What a rank on a host of its own, with a folder of its own, says of days in a store."""
    rank = os.environ["RANK"]
    platform.node = lambda: f"host{rank}"
    os.environ |= {**environment, "STAMPEDE_STORES": str(path.parent / f"stores{rank}")}
    with pytest.raises(stampede.RunFolderError) as refusal:
        periods.train(path, overrides)
    return str(refusal.value)


def test_days_of_hosts_without_a_shared_folder_are_refused(store, tmp_path):
    path = periods.write_logs(tmp_path / "job", [1])
    ours = {name: os.environ[name] for name in os.environ if name.startswith("AWS_")}
    given = [f"run.dir={BUCKET}/runs"]
    for said in run_ranks(2, refused_days, path, given, ours, ranks_per_node=1):
        assert said.endswith("such as by NFS, and write it as $STAMPEDE_STORES")
    assert not store.find(f"{BUCKET}/runs")


@pytest.mark.wide
def test_a_run_is_not_replaced_unasked(store, tmp_path, monkeypatch):
    job = put_movies(store, tmp_path)
    train(tmp_path, job)
    another_machine(monkeypatch, tmp_path / "other")
    with pytest.raises(stampede.RunFolderError, match="movies exists; write run"):
        train(tmp_path, job)
    (changed,) = [store.info(f"{BUCKET}/runs/movies/summary.json")["ETag"]]
    train(tmp_path, [*job, "run.overwrite=true", "run.seed=2"])
    store.invalidate_cache()
    assert store.info(f"{BUCKET}/runs/movies/summary.json")["ETag"] != changed


@pytest.mark.wide
def test_rows_that_are_fetched_while_they_are_read(store, tmp_path):
    """In two processes, and in one, continued, beside what a folder of the disk gives."""
    data, url = reading.prepared(tmp_path / "data"), f"{BUCKET}/prepared"
    store.put(str(data), url, recursive=True)
    ours = {name: os.environ[name] for name in os.environ if name.startswith(("AWS_", "STAMPEDE_"))}

    def trained(name, data, *overrides, ranks=1):
        (tmp_path / name).mkdir(exist_ok=True)
        if ranks > 1:
            given = [*overrides, "train.epochs=2", "sharding.plan=row_wise"]
            run_ranks(ranks, run_prepared_with, ours, tmp_path / name, data, given, ranks)
            return without_times(tmp_path / name / "small")
        for epochs in (1, 2):
            given = [*overrides, f"train.epochs={epochs}", "checkpoint.resume=auto"]
            reading.run_prepared(tmp_path / name, data, given)
        return without_times(tmp_path / name / "small")

    # Half of the cache takes the place of the memory.
    disk = trained("disk", data, "data.memory_gb=5e-6")
    assert trained("streamed", url, "data.cache_gb=1e-5") == disk
    two = trained("two", data, "data.memory_gb=5e-6", ranks=2)
    assert trained("streamed_two", url, "data.cache_gb=1e-5", ranks=2) == two
    there = [file.name for file in stores.local(url).iterdir()]
    assert "manifest.json" in there and not [name for name in there if "ids" in name]
    with pytest.raises(stampede.SettingsError, match=r"data\.residence: found 'memory', which"):
        trained("refused", url, "data.cache_gb=1e-5", "data.residence=memory")
    with pytest.raises(stampede.SettingsError, match=r"data\.cache_gb: .* delete the key"):
        trained("refused", data, "data.cache_gb=1e-5")
    # With room for all of it, it is copied.
    assert len(trained("copied", url, "data.cache_gb=1")) == len(disk)
    assert any("ids" in file.name for file in stores.local(url).iterdir())


def run_prepared_with(environment, *arguments):
    os.environ |= environment
    reading.run_prepared(*arguments)


@pytest.mark.wide
def test_a_store_that_takes_nothing_more_stops_the_run_with_a_sentence(store, tmp_path):
    job = put_movies(store, tmp_path)
    refuse = []

    def answer(method, path):
        return (403, None) if method == "PUT" and "/checkpoints/" in path and refuse else None

    with between(answer):
        refuse.append(True)
        with pytest.raises(stampede.TrainingStoppedError) as failure:
            train(tmp_path, job)
    assert f"{BUCKET}/runs/movies" in str(failure.value)
    assert "access is refused" in str(failure.value) and "make room" not in str(failure.value)
    # Nothing half-written counts: no manifest of a checkpoint came.
    assert not store.find(f"{BUCKET}/runs/movies/checkpoints/epoch_0001/manifest.json")


def train_until_killed(folder, overrides, environment):
    """As a rank that is killed when its run has been published twice."""
    os.environ |= environment
    published, left = stores.published, [2]

    def last(url, *more):
        published(url, *more)
        left[0] -= str(url).endswith("movies")
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    stores.published = last
    train(folder, overrides)


def test_a_killed_run_goes_on_from_the_store(store, tmp_path, monkeypatch):
    job = [*put_movies(store, tmp_path), "train.epochs=3"]
    whole = weights(train(tmp_path, [*job, "run.name=whole"]))
    ours = {name: os.environ[name] for name in os.environ if name.startswith(("AWS_", "STAMPEDE_"))}
    with pytest.raises(ProcessExitedException, match="SIGKILL"):
        run_ranks(1, train_until_killed, tmp_path, job, ours)
    another_machine(monkeypatch, tmp_path / "other")
    monkeypatch.setattr(Lease, "SECONDS", 0.2)
    found = train(tmp_path, [*job, "checkpoint.resume=auto"])
    assert len(list((found / "checkpoints").glob("epoch_*"))) >= 1
    for name, values in weights(found).items():
        np.testing.assert_array_equal(values, whole[name])
