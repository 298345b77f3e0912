"""Deltas: small folders that turn a package into a later one, byte for byte."""

import filecmp
import importlib.util
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import polars as pl
import pytest
import torch
from safetensors.torch import load_file

from stampede.engine.inference import export_command as export
from stampede.engine.inference.deltas import _changed, _changed_lines
from stampede.engine.inference.package import update
from support.object_store import BUCKET, object_store
from support.packages import loaded
from support.periods import period, train, write_job, write_log
from support.predicting import refused

# Rows that no batch touches stay as they are.
TOUCHED = ["optim.embedding.rows=touched", "optim.embedding.l2=0", "checkpoint.keep=9"]


@pytest.fixture(scope="module")
def days(tmp_path_factory):
    """Three periods with new users each; in the third some rows go to others."""
    folder = tmp_path_factory.mktemp("days")
    path = write_job(folder)
    for number, start in enumerate((0, 30, 75), 1):
        write_log(folder / f"log{number}.csv", start, seed=number, users=40)
    train(path, [*TOUCHED, "data.max_rows=70"])
    return folder


def exported(days, number, folder, *options):
    """A package or a delta of the model after a period; its folder."""
    assert export.main([str(period(days, number)), str(folder), *map(str, options)]) == 0
    return folder


def packages_and_deltas(days, folder, kind="fp32"):
    """The package of each period, and the delta from the one before, by period."""
    full = {n: exported(days, n, folder / f"full{n}", "--rows", kind) for n in (1, 2, 3)}
    since = {n: exported(days, n, folder / f"delta{n}", "--since", full[n - 1]) for n in (2, 3)}
    return full, since


@pytest.fixture(scope="module")
def read_only(days, tmp_path_factory):
    return packages_and_deltas(days, tmp_path_factory.mktemp("read"))


@pytest.fixture
def full(read_only):
    return read_only[0]


@pytest.fixture
def deltas(read_only):
    return read_only[1]


def files_of(folder):
    """What is in the files, without what Python adds to a package that was loaded."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    return {path.relative_to(folder): path.read_bytes() for path in files}


@pytest.mark.slow
def test_a_chain_of_deltas_is_a_full_export_byte_for_byte(days, full, deltas, tmp_path):
    assert_a_chain_is_whole(days, full, deltas, tmp_path)


@pytest.mark.wide
def test_a_chain_of_int8(days, tmp_path, capsys):
    full, deltas = packages_and_deltas(days, tmp_path, "int8")
    assert "changed or new" in capsys.readouterr().out
    assert_a_chain_is_whole(days, full, deltas, tmp_path)


def assert_a_chain_is_whole(days, full, deltas, tmp_path):
    second, third = deltas.values()
    # Some rows of users were in no batch, and are not in the delta.
    kept = load_file(third / "changes/user.safetensors")["rows"]
    table = load_file(full[3] / "tables/user.safetensors")["first_order"]
    assert 0 < len(kept) < len(table)
    # A URL of any kind is fetched first.
    made = update.apply(full[1], [f"file://{second}", third], tmp_path / "made")
    assert files_of(made) == files_of(full[3])
    urls = f"file://{full[1]}", f"file://{third}"
    with pytest.raises(ValueError, match="was made for another package") as failure:
        update.apply(urls[0], [urls[1]], tmp_path / "other")
    assert all(url in str(failure.value) for url in urls)
    log = pl.read_csv(days / "log3.csv", infer_schema=False).drop("click")
    found, expected = loaded(made).score(log), loaded(full[3]).score(log)
    np.testing.assert_array_equal(found, expected)
    assert not np.array_equal(loaded(full[1]).score(log), expected)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.slow
def test_rows_that_hardly_moved_may_stay(days, full, tmp_path):
    then, now = (load_file(full[number] / "tables/ad.safetensors") for number in (1, 2))
    moved = torch.maximum(
        (now["embedding"] - then["embedding"]).abs().amax(1),
        (now["first_order"] - then["first_order"]).abs(),
    )
    limit = float(moved.median())
    delta = exported(days, 2, tmp_path / "delta", "--since", full[1], "--tolerance", limit)
    rows = load_file(delta / "changes/ad.safetensors")["rows"]
    assert rows.tolist() == (moved > limit).nonzero().squeeze(1).tolist()
    made = update.apply(full[1], [delta], tmp_path / "made")
    found = load_file(made / "tables/ad.safetensors")["embedding"]
    assert 0 < float((found - now["embedding"]).abs().max()) <= limit


@pytest.mark.slow
def test_a_wrong_or_damaged_delta_leaves_nothing(full, deltas, tmp_path):
    delta = shutil.copytree(deltas[3], tmp_path / "delta")
    out = tmp_path / "out"
    in_order = r"was made for another package .* apply the deltas in order"
    for base, given, to, words in (
        (full[1], delta, out, in_order),
        (full[2], full[1], out, "no delta here"),
        (full[2], delta, full[1], "already exists"),
    ):
        with pytest.raises(ValueError, match=words):
            update.apply(base, [given], to)
    changed = delta / "changes/user.safetensors"
    whole = changed.read_bytes()
    for damaged, words in (
        (whole[:-1] + bytes([whole[-1] ^ 1]), "user"),
        (whole[:40], r"user\.safetensors cannot be made"),
    ):
        changed.write_bytes(damaged)
        with pytest.raises(ValueError, match=words):
            update.apply(full[2], [delta], out)
    assert [path.name for path in tmp_path.iterdir()] == ["delta"]


def test_mistakes_of_the_command_are_told_in_a_sentence(days, tmp_path):
    since = ("--since", tmp_path)
    for options, words in (
        (("--tolerance", "0.1"), "--tolerance works with --since only"),
        (since, "no exported model here"),
        ((*since, "--tolerance", "nan"), "--tolerance: found nan; write a number of at least 0"),
        ((*since, "--rows", "int8"), "--rows cannot be combined with --since"),
        ((*since, "--overwrite"), "--overwrite cannot be combined with --since"),
    ):
        given = (period(days, 2), tmp_path / "delta", *options)
        assert words in refused(export.main, tmp_path, *given)


def own_update(package):
    """The package's own update.py, which uses the load.py beside it."""
    spec = importlib.util.spec_from_file_location("served", package / "update.py")
    served = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(served)
    return served


@pytest.mark.wide
def test_a_server_takes_the_package_that_is_published(days, full, deltas, tmp_path):
    models = tmp_path / "models"
    first = shutil.copytree(full[1], models / "day_1")
    update.publish(models, "day_1")
    log = pl.read_csv(days / "log2.csv", infer_schema=False).drop("click")
    served = own_update(first)
    model = served.load_current(models)
    before = model.score(log)
    # As a server applies it, without stampede.
    command = [sys.executable, first / "update.py", first, deltas[2], "--out", models / "day_2"]
    subprocess.run([*command, "--publish"], check=True, capture_output=True)
    after = served.load_current(models).score(log)
    # A loaded model does not change.
    np.testing.assert_array_equal(model.score(log), before)
    assert not np.array_equal(after, before)
    np.testing.assert_array_equal(after, loaded(full[2]).score(log))
    (models / update.CURRENT).unlink()
    with pytest.raises(ValueError, match="names no package"):
        served.load_current(models)


@pytest.mark.slow
def test_a_package_is_made_in_a_store(days, full, deltas, tmp_path, monkeypatch, capsys):
    served = own_update(full[1])
    models, log = f"{BUCKET}/models", pl.read_csv(days / "log2.csv", infer_schema=False)
    with object_store(tmp_path / "copies") as store:
        command = [str(full[1]), str(deltas[2]), "--out", f"{models}/day_2", "--publish"]
        put, names = store.put_file, []

        def fails(here, name, **options):
            names.append(name.rpartition("/")[2])
            if names[-1] == update.PACKAGE:
                raise OSError("cut off")
            return put(here, name, **options)

        # Without its description, which comes last, it is no package.
        with monkeypatch.context() as patched:
            patched.setattr(store, "put_file", fails)
            assert served.main(command) == 2
        assert f"error: {models}/day_2: cannot be written (cut off)" in capsys.readouterr().err
        assert len(names) == len([p for p in files_of(full[2]) if p.suffix != ".pyc"])
        with pytest.raises(ValueError, match=f"^{models}/day_2: no exported model here"):
            served.load.load(f"{models}/day_2")
        with pytest.raises(ValueError, match=f"{models}/current.json: names no package"):
            served.load_current(models)
        # What is there is never changed.
        assert served.main(command) == 2
        assert f"{models}/day_2: already exists" in capsys.readouterr().err
        store.rm(f"{models}/day_2", recursive=True)
        assert served.main(command) == 0
        said = capsys.readouterr()
        assert said.out == f"{models}/day_2\n" and f"{models}/current.json names day_2" in said.err
        for name, content in files_of(full[2]).items():
            assert store.cat_file(f"{models}/day_2/{name.as_posix()}") == content
        found = served.load_current(f"{models}/").score(log.drop("click"))
        np.testing.assert_array_equal(found, loaded(full[2]).score(log.drop("click")))
    made = served.apply(full[1], [deltas[2]], f"file://{tmp_path}/here")
    assert files_of(made) == files_of(full[2])


def test_other_versions_of_libraries_may_apply_a_delta(days, full, deltas, tmp_path, monkeypatch):
    """They write the same tensors and ids in other bytes."""
    write_parquet, save_file = pl.DataFrame.write_parquet, update.save_file
    monkeypatch.setattr(
        pl.DataFrame, "write_parquet", lambda *a: write_parquet(*a, compression="gzip")
    )
    monkeypatch.setattr(update, "save_file", lambda *a: save_file(*a, metadata={"by": "another"}))
    second = update.apply(full[1], [deltas[2]], tmp_path / "second")
    made = update.apply(second, [deltas[3]], tmp_path / "made")
    for name in ("tables/user.safetensors", "vocabularies/user.parquet"):
        assert not filecmp.cmp(made / name, full[3] / name, shallow=False)
    log = pl.read_csv(days / "log3.csv", infer_schema=False).drop("click")
    np.testing.assert_array_equal(loaded(made).score(log), loaded(full[3]).score(log))


def test_no_program_is_taken_from_a_delta(full, deltas, tmp_path):
    delta = shutil.copytree(deltas[2], tmp_path / "delta")
    assert not list(delta.rglob("*.py"))
    (delta / "load.py").write_text("raise SystemExit('taken')")
    made = update.apply(full[1], [delta], tmp_path / "made")
    assert files_of(made) == files_of(full[2])
    text = (delta / "delta.json").read_text()
    (delta / "delta.json").write_text(text.replace('"tables/user.safetensors"', '"load.py"'))
    with pytest.raises(ValueError, match=r"'load\.py' is not a file name of a package"):
        update.apply(full[1], [delta], tmp_path / "as_table")


def test_nothing_outside_of_a_delta_is_read(full, deltas, tmp_path):
    delta = shutil.copytree(deltas[2], tmp_path / "delta")
    about = json.loads((delta / "delta.json").read_text())
    for kind in ("tables", "vocabularies"):
        for name in ("../../theirs", "/etc/hostname", 5, "changes/../../x"):
            wrong = {**about, kind: dict.fromkeys(about[kind], name)}
            (delta / "delta.json").write_text(json.dumps(wrong))
            with pytest.raises(ValueError, match="is not a file name of a package"):
                update.apply(full[1], [delta], tmp_path / "new")
    for text in ('{"format": 1e400}', "[]", "null", json.dumps({**about, "tables": None})):
        (delta / "delta.json").write_text(text)
        with pytest.raises(ValueError, match="no delta here"):
            update.apply(full[1], [delta], tmp_path / "new")
    (delta / "delta.json").write_text(json.dumps(about))
    table = delta / next(iter(about["tables"].values()))
    os.replace(table, tmp_path / "theirs")
    table.symlink_to(tmp_path / "theirs")
    with pytest.raises(ValueError, match="is a link, which may lead out of the delta"):
        update.apply(full[1], [delta], tmp_path / "new")
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
def test_a_delta_that_would_give_something_else_is_not_written(days, full, tmp_path, monkeypatch):
    base = shutil.copytree(full[1], tmp_path / "full1")
    # As if a bug left a row out.
    monkeypatch.setattr(
        "stampede.engine.inference.deltas._changed", lambda *given: _changed(*given)[1:]
    )
    given = (export.main, tmp_path, period(days, 2), tmp_path / "delta", "--since", base)
    assert "differs from the export after the update" in refused(*given)
    monkeypatch.undo()
    # As another version of stampede would write it.
    with (base / "encode.py").open("a") as file:
        file.write("\n")
    about = json.loads((base / "package.json").read_text())
    about = {key: value for key, value in about.items() if key not in ("files", "sha256")}
    (base / "package.json").write_text(update.sealed(about, base))
    assert "its encode.py is from another version of stampede" in refused(*given)


def test_a_vocabulary_may_get_shorter():
    old, new = pl.Series("value", ["a", "b", "c"]), pl.Series("value", ["a", "x"])
    changed = _changed_lines(old, new)
    assert update.patched_vocabulary(old, changed, 2).to_list() == ["a", "x"]
