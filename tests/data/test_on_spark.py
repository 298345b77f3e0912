"""Preparation and scoring on Spark, compared with those of one process."""

import datetime
import filecmp
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pandas as pd
import polars as pl
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

from support.spark import missing

if missing():
    pytest.skip(missing(), allow_module_level=True)

from stampede import open_run, spark, stores
from stampede.data import on_spark
from stampede.data.errors import DataError
from stampede.data.on_spark import OnSpark, engine_of, session
from stampede.data.options import PreparationOptions
from stampede.data.prepare import prepare
from stampede.data.prepare_command import main
from stampede.data.sources import open_source
from stampede.data.synthetic_command import main as write_criteo
from stampede.engine.checkpoint.retention import newest
from stampede.engine.cli import stampede
from stampede.engine.config.load import load_config
from stampede.engine.run import run
from stampede.settings import SettingsError
from support import periods
from support.jobs import tensors_of
from support.movie_runs import JOB, prepare_movies, train_on_movies
from support.movies import MOVIES, movies, write_movies
from support.object_store import BUCKET, object_store
from support.packages import loaded
from support.predicting import run_command

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """A session whose workers find the object store of this process."""
    with object_store(tmp_path_factory.mktemp("of_workers")):
        found = session("local[2]")
    yield found
    found.stop()


SHARED = MOVIES.replace("movie: {max_size: 5}", "movie: {share: user}")
# A history of another field's ids, and two goals.
HISTORIES = """
label: {seen: {column: slot, at_least: 3}, liked: {column: rating, at_least: 4}}
ids:
  kind: {column: city, min_count: 2}
  genres: {separator: "|", max_ids: 2, keep: last, share: kind, pooling: attention, query: kind}
"""


def write_logs(folder, frame, cuts, form="csv"):
    """A log in several files, the schema of movies; the glob of it."""
    folder.mkdir(exist_ok=True)
    for number, (begin, end) in enumerate(zip([0, *cuts], [*cuts, len(frame)], strict=True)):
        write_movies(folder / f"log_{number}.{form}", frame[begin:end])
    (folder / "schema.yaml").write_text(MOVIES)
    return f"{folder}/log_*.{form}"


def prepared(folder, files, engine=None, schema=MOVIES, **options):
    schema_file = folder.with_suffix(".yaml")
    schema_file.write_text(schema)
    checked = PreparationOptions(**options)
    source = open_source("table", files, checked, schema=str(schema_file))
    assert prepare(source, checked, folder, engine)
    return folder


def assert_same(one, other):
    """All files are equal; in the manifest all but what names places and seconds."""
    names = sorted(str(path.relative_to(one)) for path in one.rglob("*") if path.is_file())
    assert names == sorted(str(p.relative_to(other)) for p in other.rglob("*") if p.is_file())
    for name in set(names) - {"manifest.json", "verified.json"}:
        assert filecmp.cmp(one / name, other / name, shallow=False), name
    found = [json.loads((folder / "manifest.json").read_text()) for folder in (one, other)]
    for manifest in found:
        for key in ("seconds", "files", "bytes"):
            del manifest["source"][key]
    assert found[0] == found[1]


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "cuts, options",
    [
        ((1, 100, 101), {"split": "by_column", "split_column": "city", "test_values": ["Oslo"]}),
        ((1, 100, 101), {"split": "highfreq", "keep_ids": 3, "spool": False}),
        ((1, 100, 101), {"split": "periods"}),
        (
            (1, 100, 101),
            {"split": "random", "shard_rows": 100, "numbers_dtype": "float16", "counts_gb": 1e-6},
        ),
    ],
)
def test_the_folder_is_that_of_one_process(local, tmp_path, cuts, options):
    # Hadoop reads and writes URLs in its own way.
    folder = tmp_path / "for 50% \u00e9"
    files = write_logs(folder, movies(800), cuts)
    here = prepared(folder / "here", files, **options)
    there = prepared(folder / "there", files, partial(OnSpark, local), **options)
    assert_same(here, there)


@pytest.mark.cases(1)
@pytest.mark.parametrize("logs", [0, 20])
def test_random_logs(local, tmp_path_factory, logs):
    """Ties in counts, files without rows of a part, empty bags, missing numbers, both zeros."""

    @settings(max_examples=max(logs, 1), phases=[Phase.explicit, Phase.generate][: logs + 1])
    @given(st.integers(0, 2**32 - 1), st.sampled_from([MOVIES, SHARED, HISTORIES]))
    @example(0, HISTORIES)
    @example(2, SHARED)
    def is_the_same(seed, schema):
        tmp_path, draw = tmp_path_factory.mktemp("random"), np.random.default_rng(seed)
        frame = movies(int(draw.integers(60, 500)))
        frame["genres"] = draw.permutation(frame["genres"])
        frame["user"] = draw.integers(0, 40, len(frame))
        others = draw.choice([0.0, -0.0, 2.5], len(frame))
        frame["age"] = frame["age"].where(draw.random(len(frame)) < 0.5, others)
        cuts = sorted(draw.integers(1, len(frame), int(draw.integers(0, 6))).tolist())
        form = str(draw.choice(["csv", "parquet", "csv.gz"]))
        files = write_logs(tmp_path, frame, [*dict.fromkeys(cuts)], form)
        options = {
            "split": str(draw.choice(["random", "sequential"])),
            "shard_rows": int(draw.integers(5, 200)),
            "test_fraction": float(draw.choice([0.0, 0.1, 0.6])),
        }
        here = prepared(tmp_path / "here", files, schema=schema, **options)
        there = prepared(tmp_path / "there", files, partial(OnSpark, local), schema, **options)
        assert_same(here, there)

    is_the_same()


@pytest.mark.wide
def test_a_large_file_is_read_by_several_tasks(local, tmp_path, monkeypatch):
    """40 MB of text, divided after each 16 MB."""
    monkeypatch.setattr(on_spark, "_MOST_PIECES", 1)
    write_criteo([str(tmp_path / "log"), "--files", "1", "--rows", "150000"])
    options, engines = PreparationOptions(split="random"), []
    source = open_source("criteo_kaggle", f"{tmp_path}/log/*.tsv", options)

    def engine(*given):
        engines.append(OnSpark(local, *given))
        return engines[0]

    assert prepare(source, options, tmp_path / "here")
    assert prepare(source, options, tmp_path / "there", engine)
    assert len(engines[0].tasks) == 3
    assert_same(tmp_path / "here", tmp_path / "there")


def test_days_are_prepared_on_spark(local, tmp_path):
    """The same model, day after day, with ids that wait and come."""
    admission, on_spark = "data.admission_periods=2", "data.spark=local[2]"
    for name, more in (("here", []), ("there", [on_spark])):
        path = periods.write_logs(tmp_path / name, [1, 20, 40])
        periods.train(path, [admission, *more])
    # Prepared there, trained here.
    path = periods.write_logs(tmp_path / "ahead", [1])
    for number, first_user in enumerate([1, 20, 40], 1):
        periods.write_log(tmp_path / f"ahead/log{number}.csv", first_user, number)
        periods.train(path, [admission, on_spark], prepare_only=True)
        with patch("stampede.engine.reading.engine_of") as engine:
            engine.return_value.__enter__.return_value = None
            with patch("stampede.data.prepare.OneProcess", side_effect=AssertionError):
                periods.train(path, [admission])
    here, *others = (
        tensors_of(newest(periods.period(tmp_path / name, 3) / "checkpoints"))
        for name in ("here", "there", "ahead")
    )
    for found in others:
        assert here.keys() == found.keys()
        for name, values in here.items():
            np.testing.assert_array_equal(found[name], values)
    # A session that was there is left.
    assert local.range(3).count() == 3


def broken(frame, at):
    """With a slot that is no slot."""
    found = frame.copy()
    found["slot"] = found["slot"].astype(object)
    found.loc[at, "slot"] = "x"
    return found


def test_bad_rows_are_told_alike(local, tmp_path):
    files = write_logs(tmp_path, broken(movies(300), [7, 120, 121, 290]), (100, 200))
    engine, said = partial(OnSpark, local), []
    for number, one in enumerate((None, engine)):
        with pytest.raises(DataError) as failure:
            prepared(tmp_path / f"refused_{number}", files, one)
        said.append(str(failure.value))
        assert not (tmp_path / f"refused_{number}").exists()
    assert said[0] == said[1] and "log_0.csv: line 9, column slot" in said[0]
    here = prepared(tmp_path / "here", files, on_bad_row="skip")
    assert_same(here, prepared(tmp_path / "there", files, engine, on_bad_row="skip"))


def test_labels_of_two_kinds_in_two_files_are_refused(local, tmp_path):
    for name, labels in (("log_0.csv", "1\n-1\n"), ("log_1.csv", "1\n0\n")):
        (tmp_path / name).write_text("click,user\n" + labels.replace("\n", ",u\n") * 20)
    with pytest.raises(DataError, match=r"log_1\.csv: column click: found labels -1 and 0"):
        prepared(
            tmp_path / "there",
            f"{tmp_path}/log_*.csv",
            partial(OnSpark, local),
            "label: click\nids: {user: {}}\n",
        )


def test_a_spark_table_is_prepared_and_scored(local, tmp_path):
    prepare_movies(tmp_path)
    frame = pd.read_csv(tmp_path / "log.csv", dtype={"city": str}, keep_default_na=False)
    frame["age"] = pd.to_numeric(frame["age"])
    rows = [tuple(None if v != v else v for v in row) for row in frame.itertuples(index=False)]
    table = local.createDataFrame(list(map(tuple, rows)), list(frame.columns)).coalesce(1)
    options = {"split": "random", "validation_fraction": 0.2}
    # A name that is no pattern.
    place = tmp_path / "spark [1] {a}"
    found = spark.prepare(table, tmp_path / "schema.yaml", f"file://{place}", options)
    assert found == place
    pl.DataFrame(
        rows, schema=list(frame.columns), orient="row", infer_schema_length=None
    ).write_parquet(tmp_path / "one.parquet")
    assert_same(prepared(tmp_path / "here", f"{tmp_path}/one.parquet", **options), found)
    with pytest.raises(DataError, match="already exists"):
        spark.prepare(table, tmp_path / "schema.yaml", place)
    paper = {**options, "features": "paper", "min_count": 2}
    assert_same(
        prepared(tmp_path / "paper", f"{tmp_path}/one.parquet", **paper),
        spark.prepare(table, tmp_path / "schema.yaml", tmp_path / "paper on spark", paper),
    )
    with pytest.raises(DataError, match=r"^the table: .*age"):
        spark.prepare(table.drop("age"), tmp_path / "schema.yaml", tmp_path / "none")
    with pytest.raises(DataError, match="the table has no rows"):
        spark.prepare(table.limit(0), tmp_path / "schema.yaml", tmp_path / "none")
    with object_store(tmp_path / "copies"):
        spark.prepare(table, tmp_path / "schema.yaml", f"{BUCKET}/prepared", options)
        with patch.dict(os.environ, {"STAMPEDE_STORES": str(tmp_path / "elsewhere")}):
            assert_same(found, stores.fetched(f"{BUCKET}/prepared"))
    scored = []
    local.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", 90)
    # Another model in the same folder is not taken for the one before.
    for seed in (1, 2):
        if seed == 2:
            # With a history of another length in each row.
            schema = MOVIES.replace("genres: {", "genres: {pooling: attention, query: movie, ")
            assert schema != MOVIES
            (tmp_path / "schema.yaml").write_text(schema)
        run = train_on_movies(tmp_path, f"run.name=seed_{seed}", f"run.seed={seed}")
        open_run(run).export(tmp_path / "package", overwrite=True)
        # Columns that the model does not use may have any type.
        more = table.repartition(3).selectExpr("*", "current_timestamp() AS now", "array(1) AS few")
        found = pl.from_arrow(spark.scores(more, tmp_path / "package").toArrow())
        # In batches of another size.
        expected = loaded(tmp_path / "package").score(found.drop("score"))
        np.testing.assert_array_equal(found["score"].to_numpy(), expected)
        np.testing.assert_array_equal(open_run(run).score(found.drop("score")), expected)
        rows, scores = (tmp_path / f"{name}_{seed}.parquet" for name in ("rows", "scores"))
        found.drop("score").write_parquet(rows)
        assert stampede(["predict", str(run), str(rows), str(scores)]) == 0
        np.testing.assert_array_equal(pl.read_parquet(scores)["score"].to_numpy(), expected)
        assert len(found) == len(frame)
        scored.append(found["score"].to_list())
    assert sorted(scored[0]) != sorted(scored[1])
    # Spark's workers fetch it, too.
    with object_store(tmp_path / "copies"):
        assert stampede(["export", str(run), f"{BUCKET}/package"]) == 0
        fetched = pl.from_arrow(spark.scores(more, f"{BUCKET}/package").toArrow())
    assert sorted(fetched["score"]) == sorted(scored[1])
    package = f"file://{tmp_path / 'package'}"
    with pytest.raises(DataError, match="has a column 'score'; rename it"):
        spark.scores(table.withColumn("score", table.age), package)
    with pytest.raises(DataError, match=r"the table to score: .*age"):
        spark.scores(table.drop("age"), package)


TIMED = """
format: parquet
label: clicked
ids: {at: {min_count: 1}, kind: {column: of.kind, min_count: 1}, day: {min_count: 1}}
numbers: {size: {column: of.size}}
"""


@pytest.mark.wide
def test_times_and_what_is_within_columns(local, tmp_path):
    """Times of any year, in whatever zone Spark shows them; columns that no model reads."""
    draw, utc = np.random.default_rng(0), datetime.timezone.utc
    begin = datetime.datetime(1500, 3, 1, tzinfo=utc)
    rows = [
        (int(draw.integers(2)), begin + datetime.timedelta(days=int(d), hours=5),
         {"kind": f"k{d % 3}", "size": float(d)}, datetime.date(2024, 1, 1 + int(d) % 5))
        for d in draw.integers(0, 400_000, 300)
    ]  # fmt: skip
    names = ["clicked", "at", "of", "day"]
    frame = pl.DataFrame(rows, schema=names, orient="row")
    of = pl.Struct({"kind": pl.String, "size": pl.Float64})
    frame = frame.cast({"at": pl.Datetime("us", "UTC"), "of": of})
    frame.write_parquet(tmp_path / "one.parquet")
    schema = "clicked INT, at TIMESTAMP, of STRUCT<kind: STRING, size: DOUBLE>, day DATE"
    local.conf.set("spark.sql.session.timeZone", "America/New_York")
    table = local.createDataFrame(rows, schema).coalesce(1)
    here = prepared(tmp_path / "here", f"{tmp_path}/one.parquet", schema=TIMED, split="random")
    schema_file = tmp_path / "here.yaml"
    more = table.selectExpr("*", "1 AS DAY", "2 AS DAY", "make_interval(1) AS pause")
    there = spark.prepare(more, schema_file, tmp_path / "there", {"split": "random"})
    assert_same(here, there)
    job = [one for one in JOB if not one.startswith("data.")]
    given = ["data.kind=prepared", f"data.path={here}", f"run.dir={tmp_path}", "run.name=timed"]
    (tmp_path / "job.yaml").write_text("")
    run(load_config(tmp_path / "job.yaml", [*job, *given], 1))
    model = open_run(tmp_path / "timed")
    model.export(tmp_path / "package")
    found = spark.scores(table, tmp_path / "package").toArrow()["score"]
    np.testing.assert_array_equal(found, model.score(pl.read_parquet(tmp_path / "one.parquet")))
    # A column that only the split reads.
    given = {"split": "by_column", "split_column": "at", "test_from": "1900-01-01 05:00:00"}
    without = TIMED.replace("at: {min_count: 1}, ", "")
    schema_file.write_text(without)
    assert spark.prepare(table, schema_file, tmp_path / "by_column", given).exists()
    with pytest.raises(DataError, match="clicked"):
        spark.prepare(table.select("of"), schema_file, tmp_path / "none")
    twice = table.selectExpr("*", "1 AS clicked")
    with pytest.raises(DataError, match="the table has the column 'clicked' twice"):
        spark.prepare(twice, schema_file, tmp_path / "none")
    with pytest.raises(DataError, match="CalendarIntervalType"):
        spark.scores(table.selectExpr("*", "make_interval(1) AS i"), tmp_path / "package")


def test_what_fails_in_spark_itself_is_told_in_a_sentence(local, tmp_path):
    files = write_logs(tmp_path, movies(20), ())
    source = open_source("table", files, PreparationOptions(), schema=str(tmp_path / "schema.yaml"))
    engine = OnSpark(local, source, PreparationOptions(), tmp_path / "out")
    with pytest.raises(DataError, match=r"Spark failed \(.*\); see the log of its workers"):
        engine._each(1, lambda number: os._exit(1))
    with pytest.raises(DataError, match=r"Spark failed \(ZeroDivisionError: .* by zero\)"):
        engine._each(1, lambda number: 1 // number)


@pytest.mark.wide
def test_the_command_on_a_cluster(tmp_path):
    """Spark's own master and two workers, each a process of its own."""
    import pyspark

    home = Path(pyspark.__file__).parent
    environment = {**os.environ, "SPARK_HOME": str(home), "PYSPARK_PYTHON": sys.executable}
    environment |= {"SPARK_LOCAL_IP": "127.0.0.1", "SPARK_NO_DAEMONIZE": "1"}
    run = [str(home / "bin/spark-class")]
    log = (tmp_path / "spark.log").open("w+")
    kept = {"env": environment, "stdout": log, "stderr": log}
    master = [*run, "org.apache.spark.deploy.master.Master", "--host", "127.0.0.1"]
    processes = [subprocess.Popen([*master, "--port", "0", "--webui-port", "0"], **kept)]
    try:
        address = waited(tmp_path / "spark.log", "Starting Spark master at ")
        worker = [*run, "org.apache.spark.deploy.worker.Worker", "--host", "127.0.0.1"]
        worker += ["--cores", "1", "--memory", "1G", "--webui-port", "0"]
        worker += ["--work-dir", str(tmp_path / "worker"), address]
        processes += [subprocess.Popen(worker, **kept) for _ in range(2)]
        files = write_logs(tmp_path, movies(300), (100, 200))
        command = [sys.executable, "-m", "stampede", "prepare", "table", files]
        command += ["--schema", str(tmp_path / "schema.yaml"), "--set", "split=random"]
        command += ["--out", str(tmp_path / "there"), "--spark", address]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    finally:
        for process in processes:
            process.kill()
            process.wait()
    here = prepared(tmp_path / "here", files, split="random")
    assert_same(here, tmp_path / "there")


def waited(file, words):
    """What a file says after these words, once it does."""
    for _ in range(1200):
        if words in (text := file.read_text()):
            return text.partition(words)[2].split()[0]
        time.sleep(0.1)
    raise AssertionError(file.read_text())


@pytest.mark.wide
def test_a_session_of_another_thread_is_left(local, tmp_path):
    files = write_logs(tmp_path, movies(100), ())

    def prepare_there():
        with engine_of("local[2]") as engine:
            prepared(tmp_path / "there", files, engine)

    with ThreadPoolExecutor(1) as thread:
        thread.submit(prepare_there).result()
    assert local.range(3).count() == 3


@pytest.mark.wide
def test_a_folder_is_prepared_anew(local, tmp_path):
    """Spark's processes do not keep the vocabularies of the log before."""
    engine = partial(OnSpark, local)
    for frame in (movies(200), movies(400)[200:]):
        files = write_logs(tmp_path, frame, (50, 100, 150))
        for name, one in (("here", None), ("there", engine)):
            shutil.rmtree(tmp_path / name, ignore_errors=True)
            prepared(tmp_path / name, files, one)
        assert_same(tmp_path / "here", tmp_path / "there")


@pytest.mark.wide
def test_workers_find_files_by_relative_names_and_tell_which_is_gone(local, tmp_path, monkeypatch):
    """Spark's workers began in another folder."""
    write_logs(tmp_path, movies(300), (100, 200))
    monkeypatch.chdir(tmp_path)
    engine = partial(OnSpark, local)
    here = prepared(Path("here"), "log_*.csv")
    assert_same(here, prepared(Path("there"), "log_*.csv", engine))
    source = open_source("table", "log_*.csv", PreparationOptions(), schema="schema.yaml")
    (tmp_path / "log_1.csv").unlink()
    with pytest.raises(DataError, match=r"log_1\.csv: No such file or directory$"):
        OnSpark(local, source, PreparationOptions(), tmp_path).counts()


def test_what_is_prepared_needs_no_spark(tmp_path, monkeypatch):
    prepare_movies(tmp_path)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    given = "data.spark=local[1]"
    with monkeypatch.context() as without:
        without.setenv("PATH", "")
        with pytest.raises(SettingsError, match=r"^data\.spark needs Java 17"):
            train_on_movies(tmp_path, given)
    train_on_movies(tmp_path, "run.name=here")
    monkeypatch.setenv("PATH", "")
    train_on_movies(tmp_path, "run.name=there", given)
    (tmp_path / "out").mkdir()
    command = ["table", tmp_path / "log.csv", "--schema", tmp_path / "schema.yaml", "--spark", "x"]
    status, said = run_command(main, *command, "--out", tmp_path / "out")
    assert status != 0 and "out: already exists" in said


def test_what_is_not_installed_is_named(tmp_path, monkeypatch):
    files = write_logs(tmp_path, movies(50), ())
    given = ["table", files, "--out", str(tmp_path / "out"), "--schema"]
    given += [str(tmp_path / "schema.yaml"), "--spark", "local[1]"]
    monkeypatch.delenv("JAVA_HOME", raising=False)
    with monkeypatch.context() as without:
        without.setenv("PATH", "")
        status, said = run_command(main, *given)
    assert status == 2 and "--spark needs Java 17" in said
    monkeypatch.setitem(sys.modules, "pyspark.sql", None)
    status, said = run_command(main, *given)
    assert status == 2 and "--spark needs the package pyspark" in said
