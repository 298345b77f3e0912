"""A log that comes in files: each new one is scored, then trained on."""

import itertools
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from contextlib import suppress

import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch

from stampede.data import DataError
from stampede.data.prepare import prepare as prepare_log
from stampede.engine import api, incremental, reading
from stampede.engine.checkpoint.retention import being_read, newest
from stampede.engine.config.load import load_config
from stampede.engine.errors import RunFolderError
from stampede.engine.inference.trained import open_trained
from stampede.engine.periods import loop
from stampede.engine.periods.results import Results
from stampede.engine.run import run
from stampede.engine.training import evaluate, trainer
from stampede.settings import SettingsError
from support.jobs import tensors_of
from support.object_store import BUCKET, object_store
from support.periods import lines, period, train, write_job, write_log, write_logs
from support.ranks import run_ranks

# So small a rate leaves the weights as they were drawn.
STILL = ("optim.embedding.lr=1e-30", "optim.embedding.l2=0")
KEEP_ALL = ["checkpoint.keep=3"]


DIM, MOMENTS = 4, ("momentum1", "exp_avg_sq")


def tensors(folder, number):
    """All tensors after a period."""
    return tensors_of(newest(period(folder, number) / "checkpoints"))


def ids_of(folder, number, field):
    """Row of each id after a period."""
    file = period(folder, number) / f"inputs/learned/{field}.parquet"
    return {text: row for row, text in enumerate(pl.read_parquet(file)["value"], 2)}


def rows_of(found, field, row):
    """Weights and moments of a row."""
    begin = f"front.ebc.embedding_bags.t_{field}.weight"
    names = [f"model.{begin}", *(f"fused.{begin}.t_{field}.{m}" for m in MOMENTS)]
    return torch.stack([found[name][row] for name in names])


def assert_same_end(folder, other):
    """Both folders hold three periods with the same bits and lines."""
    found, expected = tensors(folder, 3), tensors(other, 3)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    one, two = ([{**line, "file": ""} for line in lines(one)] for one in (folder, other))
    assert one == two


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """A folder with three periods; half of the users of each are new."""
    folder = tmp_path_factory.mktemp("three")
    train(write_logs(folder, [0, 30, 60]), KEEP_ALL)
    return folder


# Periods of a small log, each of which is a new model of all files so far.
ANEW = ["train.replay=null", "train.epochs=2", *KEEP_ALL]


@pytest.fixture(scope="module")
def anew(tmp_path_factory):
    """The same log, trained so."""
    folder = tmp_path_factory.mktemp("anew")
    train(write_logs(folder, [0, 30, 60]), ANEW)
    return folder


@pytest.mark.slow
@pytest.mark.usefixtures("drawing")
def test_every_file_is_a_period_and_new_ones_are_taken_later(three, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "grown"
    path = write_logs(folder, [0, 30])
    train(path)
    printed = capsys.readouterr().out
    assert "period   1  log1.csv        400 rows  not scored: the first" in printed
    assert "2 new periods in" in printed
    with (folder / "runs/ads/metrics.jsonl").open("a") as file:
        # As a power failure may leave it.
        file.write('{"kind": "per')
    write_log(folder / "log3.csv", 60, seed=3)
    train(path)
    assert_same_end(folder, three)
    found = lines(folder)
    assert [line["step"] for line in found] == [7, 14, 21]
    assert [line["auc"] is None for line in found] == [True, False, False]
    assert len((folder / "runs/ads/periods.png").read_bytes()) > 10_000
    capsys.readouterr()
    # A file is recognised by any path.
    monkeypatch.chdir(period(folder, 1))
    (tmp_path / "linked").symlink_to(folder)
    for where in (folder, "../../..", tmp_path / "linked"):
        train(path, [f"data.path={where}/log*.csv"])
    assert capsys.readouterr().out.count("no new file for") == 3 and lines(folder) == found
    # The rows of old periods are not needed any more, nor are all of their checkpoints.
    assert not (folder / "runs/ads/cache").exists()
    kept = [number for number in (1, 2, 3) if (period(folder, number) / "checkpoints").exists()]
    assert kept == [2, 3] and (period(folder, 1) / "summary.json").exists()


@pytest.mark.parametrize("ways", [["train.replay=0"], ANEW])
def test_a_file_that_is_prepared_ahead_is_read_from_there(ways, tmp_path, monkeypatch, capsys):
    folder, prepared = tmp_path / "ahead", []

    def prepare(source, options, place, engine):
        made = prepare_log(source, options, place, engine)
        prepared.extend([place.name] * made)
        return made

    monkeypatch.setattr(reading, "prepare", prepare)
    path = write_logs(folder, [0])
    train(path, ways)
    write_log(folder / "log2.csv", 30, seed=2)
    for _ in range(2):
        train(path, ways, prepare_only=True)
        told = capsys.readouterr().out.splitlines()[-1]
        assert told.startswith(f"prepared {folder}/log2.csv in ")
        assert all(place in told for place in prepared[1:])
    number = len(prepared)
    assert number == (2 if "train.replay=0" in ways else 3) and len(lines(folder)) == 1
    train(path, ways)
    assert len(prepared) == number and len(lines(folder)) == 2
    (folder / "log3.csv").write_text("click,user\nnonsense\n")
    with pytest.raises(DataError, match="or leave the file out with --on-bad-file skip"):
        train(path, ways, prepare_only=True)
    train(path, ways, "skip", prepare_only=True)
    assert "no new file for" in capsys.readouterr().out
    with pytest.raises(SettingsError, match=r"data\.cache: found s3://clicks/cache, but"):
        train(path, [*ways, "data.cache=s3://clicks/cache"], prepare_only=True)
    path = write_logs(tmp_path / "whole", [0, 30])
    train(path, ways)
    whole = [{**line, "file": ""} for line in lines(tmp_path / "whole")]
    assert [{**line, "file": ""} for line in lines(folder)] == whole


@pytest.mark.slow
@pytest.mark.parametrize("is_shared", [True, False])
def test_another_machine_trains_on_what_was_prepared(is_shared, tmp_path, monkeypatch):
    """From a run folder in a store, and a shared `data.cache` or none."""
    path = write_logs(tmp_path / "log", [0, 30])
    with object_store(tmp_path / "one"):
        given = [f"run.dir={BUCKET}/runs", "train.replay=0"]
        given += [f"data.cache={tmp_path}/shared"] * is_shared
        train(path, given, prepare_only=True)
        monkeypatch.setenv("STAMPEDE_STORES", str(tmp_path / "two"))
        made = []
        with monkeypatch.context() as watched:
            watched.setattr(
                reading, "prepare", lambda *given: made.append(prepare_log(*given)) or made[-1]
            )
            train(path, given)
    assert made == [False, True]


@pytest.mark.slow
def test_the_recipe_looks_at_all_rows_so_far(tmp_path):
    """The strength of a prior does not grow with every file."""
    folder = tmp_path / "recipe"
    train(write_logs(folder, [0, 30]), ["optim.embedding.lr=null"])
    first, second = (load_config(period(folder, n) / "config.yaml") for n in (1, 2))
    assert second.optim.embedding.l2 == pytest.approx(first.optim.embedding.l2 / 2)
    assert first.train.epochs == second.train.epochs == 1
    assert second.optim.embedding.schedule.decay == "constant"


@pytest.mark.wide
@pytest.mark.parametrize("how", ["three", "anew"])
def test_a_period_is_scored_by_the_model_before_it(how, request):
    """Compared with scoring the file by the run of the previous period."""
    three = request.getfixturevalue(how)
    before = api.open_run(period(three, 2))
    scores = torch.from_numpy(before.score(three / "log3.csv"))
    rows = (three / "log3.csv").read_text().splitlines()[1:]
    labels = torch.tensor([float(row[0]) for row in rows], dtype=torch.float64)
    logloss = torch.nn.functional.binary_cross_entropy(scores, labels)
    line = lines(three)[2]
    assert line["logloss"] == pytest.approx(float(logloss), rel=1e-5)
    known = ids_of(three, 2, "user")
    new = torch.tensor([row.split(",")[1] not in known for row in rows])
    assert 0 < line["new_ids_samples"] == int(new.sum()) < 400
    apart = torch.nn.functional.binary_cross_entropy(scores[new], labels[new])
    assert line["new_ids_logloss"] == pytest.approx(float(apart), rel=1e-5)
    # Rows of hashed ids stay, others are added.
    assert len(before.embeddings("site")) == 8 and len(before.embeddings("user")) > 60


@pytest.mark.wide
def test_a_period_of_a_small_log_is_a_new_model_of_all_files(anew, tmp_path, capsys):
    """The same bits as a first period of all files, or of the newest ones."""
    two = tmp_path / "two"
    for numbers, folder, run_of in (((1, 2, 3), anew, "all"), ((2, 3), two, "newest")):
        path = anew / "ads.yaml"
        if folder != anew:
            path = write_logs(folder, [0, 30, 60])
            train(path, [*ANEW, "train.replay=1"])
        paths = ",".join(str(folder / f"log{number}.csv") for number in numbers)
        given = [f"data.path=[{paths}]", "data.split=periods", f"data.cache={tmp_path}/cache"]
        run(load_config(path, [*given, *ANEW, f"run.dir={tmp_path}", f"run.name={run_of}"]))
        found, expected = tensors(folder, 3), tensors_of(newest(tmp_path / run_of / "checkpoints"))
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert [line["rows"] for line in lines(folder)] == [400] * 3
        assert lines(folder)[2]["step"] == 2 * -(-400 * len(numbers) // 64)
    summary = api.open_run(period(anew, 3)).summary
    assert summary["auc"] == lines(anew)[2]["auc"] > 0.5 and summary["period"] == 3
    assert "unseen ids: user" in capsys.readouterr().out
    assert lines(anew)[2]["new_ids_samples"] > 100


@pytest.mark.wide
def test_a_large_log_or_one_whose_files_are_gone_goes_on(tmp_path, monkeypatch, capsys):
    """From the new model of the first two files."""
    folder, other = tmp_path / "large", tmp_path / "gone"
    for where in (folder, other):
        train(write_logs(where, [0, 30]), ANEW)
        write_log(where / "log3.csv", 60, seed=3)
        assert lines(where)[1]["step"] == 2 * 13
    (other / "log1.csv").unlink()
    explicit = [*ANEW, "train.replay=2"]
    with pytest.raises(DataError, match=r"log1\.csv: does not exist, but train\.replay=2 trains"):
        train(other / "ads.yaml", explicit)
    train(other / "ads.yaml", ANEW)
    assert "log1.csv is gone: the model of the period before goes on" in capsys.readouterr().err
    monkeypatch.setattr(loop, "SMALL_LOG", 1100)
    train(folder / "ads.yaml", ANEW)
    for where in (folder, other):
        # Steps count on from those of the second period.
        assert lines(where)[2]["step"] == 2 * 13 + 2 * 7 and lines(where)[2]["auc"] > 0.5
    assert_same_end(folder, other)


@pytest.mark.wide
def test_a_file_that_goes_after_its_period_was_noted(tmp_path, monkeypatch, capsys):
    """A period that was killed before its first checkpoint is planned anew."""
    path = write_logs(tmp_path / "killed", [0, 30])
    train(path, ANEW)
    write_log(tmp_path / "killed/log3.csv", 60, seed=3)

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(loop, "run_here", killed)
        train(path, ANEW)
    (tmp_path / "killed/log1.csv").unlink()
    train(path, ANEW)
    assert "log1.csv is gone: the model of the period before goes on" in capsys.readouterr().err
    assert len(lines(tmp_path / "killed")) == 3


@pytest.mark.slow
def test_rows_and_moments_follow_their_ids(tmp_path):
    """Rows that a period does not touch stay as they were; the steps of others continue."""
    folder = tmp_path / "kept"
    path = write_logs(folder, [0, 30])
    train(path, ["optim.embedding.rows=touched", "optim.embedding.l2=0"])
    then, now = tensors(folder, 1), tensors(folder, 2)
    before, after = ids_of(folder, 1, "user"), ids_of(folder, 2, "user")
    seen = {row.split(",")[1] for row in (folder / "log2.csv").read_text().splitlines()[1:]}
    absent, shared = before.keys() - seen, before.keys() & seen
    assert len(absent) > 10 and len(shared) > 10 and before.items() <= after.items()
    for text in absent:
        was, found = rows_of(then, "user", before[text]), rows_of(now, "user", after[text])
        assert torch.equal(found, was) and was[1].any()
    for text in shared:
        was, found = rows_of(then, "user", before[text]), rows_of(now, "user", after[text])
        assert not torch.equal(found, was)
    steps = [now[name] for name in now if name.endswith(".step")]
    assert steps and all(float(step) == 14 for step in steps)


@pytest.mark.slow
def test_a_new_row_depends_only_on_its_id(tmp_path):
    """Also one that takes the place of an older id, whose moments it does not inherit."""
    capped, free, early = (tmp_path / name for name in ("capped", "free", "early"))
    for folder, starts, most in ((capped, [0, 60], 60), (free, [0, 60], "null"), (early, [60], 60)):
        train(write_logs(folder, starts), [*STILL, f"data.max_rows={most}"])
    found, expected, first = tensors(capped, 2), tensors(free, 2), tensors(early, 1)
    kept, every = ids_of(capped, 2, "user"), ids_of(free, 2, "user")
    alone = ids_of(early, 1, "user")
    assert len(kept) == 60 < len(every)
    new = kept.keys() - ids_of(capped, 1, "user").keys()
    assert len(new) > 20
    moments = []
    for text in new:
        row, free_row = rows_of(found, "user", kept[text]), rows_of(expected, "user", every[text])
        assert torch.equal(row[0][:DIM], free_row[0][:DIM])
        moments.append((row[2].sum(), free_row[2].sum()))
    torch.testing.assert_close(*map(torch.stack, zip(*moments, strict=True)), rtol=1e-3, atol=0)
    for text in alone.keys() & every.keys():
        row, other = rows_of(expected, "user", every[text]), rows_of(first, "user", alone[text])
        assert every[text] != alone[text] and torch.equal(row[0][:DIM], other[0][:DIM])
    drawn = torch.stack([rows_of(first, "user", row)[0][:DIM] for row in range(2, 50)])
    assert 0.7 < float(drawn.std()) / load_config(early / "ads.yaml").model.init_std < 1.3


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize(
    "how, given, ranks",
    [("full", [*KEEP_ALL, "data.max_rows=60"], (2, 4, 1)), ("anew", ANEW, (1, 2, 1))],
)
def test_each_period_may_have_another_number_of_ranks(how, given, ranks, request, tmp_path):
    """Where a table is full, new ids take rows on whatever rank they are."""
    alone, path = tmp_path / "alone", write_job(folder := tmp_path / "ranks")
    if how == "anew":
        alone = request.getfixturevalue(how)
    else:
        train(write_logs(alone, [0, 30, 60]), given)
    for number, count in enumerate(ranks, 1):
        shutil.copy(alone / f"log{number}.csv", folder)
        run_ranks(count, train, path, [*given, "sharding.plan=row_wise"])
    found, expected = tensors(folder, 3), tensors(alone, 3)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        scale = max(float(tensor.double().abs().max()), 1e-8)
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=2e-5 * scale)
    for one, other in zip(lines(folder), lines(alone), strict=True):
        assert one["auc"] == pytest.approx(other["auc"], abs=1e-5)
        assert one["new_ids_samples"] == other["new_ids_samples"]


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize(("how", "given"), [("three", KEEP_ALL), ("anew", ANEW)])
def test_an_interrupted_period_continues_with_the_same_bits(
    how, given, request, tmp_path, monkeypatch
):
    """As kills would leave it: errors that nobody handles, at several places."""
    three = request.getfixturevalue(how)
    folder = tmp_path / "killed"
    path = write_logs(folder, [0, 30, 60])
    failed = Counter()

    def fail_twice(owner, name):
        original, calls = getattr(owner, name), itertools.count(1)

        def failing(*arguments, **options):
            # The second time, and in a later period.
            if next(calls) in (2, 5):
                failed[name] += 1
                raise KeyboardInterrupt
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, failing)

    fail_twice(reading, "prepare")
    fail_twice(evaluate, "evaluate")
    fail_twice(trainer, "train_step")
    fail_twice(loop._Periods, "_finish")
    fail_twice(Results, "draw")
    while True:
        try:
            train(path, [*given, "checkpoint.every_steps=2"])
            break
        except KeyboardInterrupt:
            pass
    assert len(failed) == 5 and failed["train_step"] == 2
    # What every try printed is kept.
    assert (period(folder, 1) / "output.txt").read_text().count("training rows") > 1
    assert_same_end(folder, three)


def test_mistakes_are_told_in_a_sentence(three, tmp_path, capsys):
    synthetic, path = tmp_path / "quick.yaml", write_job(tmp_path / "none")
    synthetic.write_text(f"run: {{dir: {tmp_path}}}\n")
    for arguments, said in (
        ([synthetic], "data.kind is 'synthetic', which is not a log of several files"),
        ([path], "no such file or glob"),
        ([path, "data.test_fraction=0.1"], "test_fraction: delete it; split: periods has no test"),
        ([path, "run.overwrite=true"], "run.overwrite: found true, but periods always"),
    ):
        assert incremental.main([*map(str, arguments)]) == 2
        assert said in capsys.readouterr().err
    for file, text, said in (
        ("periods.json", "{", r"periods\.json: damaged .* another run\.name"),
        ("metrics.jsonl", "{no json}\n", r"metrics\.jsonl: damaged \(line 4: .* that line"),
        ("checkpoints", "of a run that has no periods", "holds a run of `train`"),
    ):
        runs = shutil.copytree(three / "runs", tmp_path / file)
        with (runs / "ads" / file).open("a" if file == "metrics.jsonl" else "w") as damaged:
            damaged.write(text)
        if file == "checkpoints":
            (runs / "ads/periods.json").unlink()
        with pytest.raises(RunFolderError, match=said):
            train(three / "ads.yaml", [f"run.dir={runs}"])


@pytest.mark.slow
def test_a_checkpoint_in_use_is_kept_with_its_vocabularies(tmp_path):
    folder = tmp_path / "read"
    path = write_logs(folder, [0])
    train(path, ["checkpoint.keep=1"])
    checkpoints = period(folder, 1) / "checkpoints"
    _, lock = being_read(lambda: newest(checkpoints))
    with lock:
        write_log(folder / "log2.csv", 30, seed=2)
        train(path, ["checkpoint.keep=1"])
        assert api.open_run(period(folder, 1)).score(folder / "log2.csv").shape == (400,)
    write_log(folder / "log3.csv", 60, seed=3)
    train(path, ["checkpoint.keep=1"])
    assert not checkpoints.exists() and not (period(folder, 1) / "inputs").exists()
    words = r"period_0001: its checkpoint was deleted, .*checkpoint.keep.*; there are: period_0003$"
    with pytest.raises(RunFolderError, match=words):
        open_trained(period(folder, 1))


def write_days(folder, write_last):
    """Three days with whole ids; a function writes the last one. What training on them prints."""
    draw, path = np.random.default_rng(0), write_job(folder)
    for day in (1, 2, 3):
        users = draw.integers(1, 40, 400)
        frame = pd.DataFrame({
            "click": draw.random(400) < 0.1 + 0.08 * (users % 10), "user": users,
            "ad": draw.integers(0, 9, 400), "site": users % 5, "price": draw.random(400).round(2),
        })  # fmt: skip
        frame["user"] = frame["user"].astype("Int64").mask(frame.index == 7)
        frame = write_last(frame) if day == 3 else frame
        frame.to_csv(folder / f"log{day}.csv", index=False)
    train(path)


@pytest.mark.wide
def test_ids_that_became_floats_are_the_same_ids(tmp_path, capsys):
    write_days(tmp_path / "whole", lambda frame: frame)
    said = capsys.readouterr()
    assert "unseen ids: none; " not in said.out and "warning" not in said.err
    assert "  missing ids: user 0.2% (0.2%)" in said.out
    write_days(tmp_path / "floats", lambda frame: frame.astype({"user": "float64"}))
    assert ",45.0," not in (tmp_path / "whole/log3.csv").read_text()
    assert ".0," in (tmp_path / "floats/log3.csv").read_text()
    assert ids_of(tmp_path / "floats", 3, "user") == ids_of(tmp_path / "whole", 3, "user")
    other, one = (lines(tmp_path / name)[2] for name in ("floats", "whole"))
    assert (other["auc"], other["ids"]) == (one["auc"], one["ids"])


@pytest.mark.slow
def test_a_period_with_many_new_ids_is_warned_of(tmp_path, capsys):
    write_days(tmp_path / "log", lambda frame: frame.assign(user="user-" + frame["user"].map(str)))
    said = capsys.readouterr()
    assert "unseen ids: user 99.8% (" in said.out or "unseen ids: user 100.0%" in said.out
    warned = [line for line in said.err.splitlines() if line.startswith("warning: ")]
    assert len(warned) == 1 and "log3.csv: field user: " in warned[0]
    # Few rows with new ids have no AUC of their own, others say how many they are.
    shown = [line for line in said.out.splitlines() if line.startswith("period ")]
    for line, told in zip(lines(tmp_path / "log"), shown, strict=True):
        count = line.get("new_ids_samples") or 0
        assert (f" in {count:,} rows where ids are new" in told) == (count >= 100)
    assert lines(tmp_path / "log")[2]["new_ids_samples"] >= 100


@pytest.mark.slow
def test_keys_that_may_change_are_taken_and_others_refused(tmp_path, monkeypatch):
    folder, cache = tmp_path / "keys", tmp_path / "cache"
    path = write_logs(folder, [0], users=20)
    train(path)
    write_log(folder / "log2.csv", 100, seed=2, users=100)
    for key, said in (
        ("model.dim=8", "the model differs from .*'user': dim was 4"),
        ("model.hidden=[9]", "the model differs from .*hidden"),
        ("optim.embedding.optimizer=adagrad", "differs from .*was 'adam', now 'adagrad'"),
    ):
        with pytest.raises(RunFolderError, match=said):
            train(path, [key])
    with pytest.raises(SettingsError, match=r"decay is 'cosine', but data\.split is 'periods'"):
        train(path, ["optim.dense.schedule.decay=cosine"])
    schema = (folder / "schema.yaml").read_text()
    for change, said in (
        (("buckets: 7", "buckets: 9"), "ids.site.buckets was 7, now 9"),
        (("  ad: {min_count: 1}\n", ""), "ids.ad was .*, now None"),
        (("[standard]", "[minmax]"), r"numbers.price.transform was \['standard'\], now"),
    ):
        (folder / "schema.yaml").write_text(schema.replace(*change))
        with pytest.raises(DataError, match=f"schema: {said}.* min_count, max_size may change"):
            train(path)
    (folder / "schema.yaml").write_text(
        schema.replace("user: {min_count: 1", "user: {min_count: 5")
    )
    used, original = [], reading.prepare
    monkeypatch.setattr(reading, "prepare", lambda *a: used.append(a[2]) or original(*a))
    train(path, [f"data.cache={cache}"])
    (file,) = used
    assert file.parent.parent == cache and not list(cache.iterdir())
    counts = Counter(row.split(",")[1] for row in (folder / "log2.csv").read_text().splitlines())
    often = {text for text, count in counts.items() if text != "user" and count >= 5}
    new = ids_of(folder, 2, "user").keys() - ids_of(folder, 1, "user").keys()
    assert new == often and 0 < len(often) < 100


def _open_files(path):
    """Files that this rank has open after each period."""
    counts, is_trained = [], loop._Periods._is_trained

    def counting(*arguments):
        done = is_trained(*arguments)
        counts.append(len(os.listdir("/proc/self/fd")))
        return done

    loop._Periods._is_trained = counting
    train(path, ["sharding.plan=row_wise"])
    return counts


@pytest.mark.wide
def test_a_process_of_many_periods_keeps_no_files_of_each(tmp_path):
    path = write_logs(tmp_path / "many", [0, 10, 20], rows=60)
    for first, *later in run_ranks(2, _open_files, path):
        assert later == [first] * 2


@pytest.mark.soak
@pytest.mark.parametrize(("how", "given"), [("three", KEEP_ALL), ("anew", ANEW)])
def test_kills_at_any_time_end_with_the_same_bits(how, given, request, tmp_path):
    folder, three = tmp_path / "killed", request.getfixturevalue(how)
    path, overrides = write_logs(folder, [0, 30, 60]), [*given, "checkpoint.every_steps=2"]
    command = [sys.executable, "-m", "stampede", "incremental", str(path), *overrides]
    drawn = random.Random(5)
    for _ in range(6):
        # From the import of torch to the third period, however slow the machine is.
        with suppress(subprocess.TimeoutExpired):
            subprocess.run(command, capture_output=True, timeout=drawn.uniform(3, 12), check=True)
    train(path, overrides)
    assert_same_end(folder, three)
