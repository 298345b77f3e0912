"""What cannot be scored is refused with a sentence; nothing half-written is left."""

import io
import shutil
import struct

import pyarrow.parquet
import pytest
import torch
import yaml

from stampede.data.apply import apply_learned
from stampede.data.options import WritingOptions
from stampede.engine.errors import RunFolderError
from stampede.engine.inference import export_command as export
from stampede.engine.inference import predict_command as command
from stampede.engine.inference.trained import open_trained
from stampede.engine.run import run as train
from support import predicting
from support.checkpoints import sign, values_of
from support.jobs import run_small, small_config
from support.movie_runs import prepare_movies, rows_of_test_part, train_on_movies
from support.movies import movies, write_movies
from support.own_networks import NUMBERS_ONLY, own_network
from support.predicting import predict, run_command, scores
from support.preparing import prepared
from support.tampering import sign_learned, swap_users


def refused(folder, *arguments):
    """What `predict` says; the folder is as it was before."""
    return predicting.refused(command.main, folder, *arguments)


def refused_by_both(folder, run, inputs, *options):
    """What `predict` and `export` say."""
    said = refused(folder, run, inputs, folder / "s.parquet", *options)
    return said, predicting.refused(export.main, folder, run, folder / "package", *options)


@pytest.mark.slow
def test_runs_that_are_not_there(trained_run, tmp_path, log):
    out, empty = tmp_path / "s.parquet", tmp_path / "empty"
    empty.mkdir()
    assert "has no checkpoint" in refused(tmp_path, empty, log, out)
    (empty / "period_0002").mkdir()
    strange = shutil.copytree(trained_run, tmp_path / "strange")
    (strange / "config.yaml").write_text("")
    for run, epoch, words in (
        (strange, "1", "config.yaml: no run wrote it (data is missing)"),
        (tmp_path / "nowhere", "1", "nowhere: no such run folder or checkpoint"),
        (empty, "1", f"write {empty}/period_0002, the newest"),
        (f"file://{trained_run}", "7", "no complete checkpoint of epoch 7"),
        (trained_run, "7", "no complete checkpoint of epoch 7; there are: epoch_0001, epoch_0002"),
        (trained_run, "last", "write best, newest, or a number"),
        (open_trained(trained_run).checkpoint, "1", "leave --epoch out"),
    ):
        assert words in refused(tmp_path, run, log, out, "--epoch", epoch)


@pytest.mark.parametrize("where", ["network.", "front."])
def test_weights_that_are_not_finite_give_no_scores(run, tmp_path, log, where):
    """Neither those of the dense layers nor those of a table, by predict and by export."""
    checkpoint = open_trained(run).checkpoint
    values = values_of(checkpoint)
    name = next(n for n in values["tensors"] if n.startswith(f"model.{where}"))
    chunk = values["tensors"][name]["chunks"][0]
    file = checkpoint / chunk["file"]
    content = bytearray(file.read_bytes())
    saved = torch.load(io.BytesIO(content[chunk["start"] : chunk["start"] + chunk["bytes"]]))
    first = content.index(saved.numpy().tobytes(), chunk["start"])
    content[first : first + 4] = struct.pack("<f", float("nan"))
    file.write_bytes(content)
    sign(checkpoint, values)
    for said in refused_by_both(tmp_path, run, log):
        assert f"{name.removeprefix('model.')} holds numbers that are not finite" in said


def test_one_unreadable_checkpoint_does_not_block_the_others(run, tmp_path, log):
    (run / "checkpoints/epoch_0003/manifest.json").write_text("{")
    status, said = predict(run, log, tmp_path / "s.parquet")
    # As far as the second one knows, the first is the best.
    assert status == 0 and "epoch 1" in said
    assert "epoch_0003: damaged checkpoint" in said and "epoch_0002 is the newest that can" in said
    assert "damaged" in refused(tmp_path, run, log, tmp_path / "t.parquet", "--epoch", "newest")
    for shard in (run / "checkpoints/epoch_0001").glob("*.distcp"):
        shard.write_bytes(shard.read_bytes()[:1000])
    assert "damaged checkpoint" in refused(tmp_path, run, log, tmp_path / "t.parquet")


def test_inputs_that_cannot_be_used(trained_run, tmp_path, log):
    for inputs, words in (
        ([tmp_path / "no*.csv"], "no such file or glob"),
        ([tmp_path], "is a folder; write its files"),
        ([tmp_path, log], "write one prepared folder alone, or files"),
        (["@run", log], "@run: is the run's own data; write it alone"),
        (["--part", "test", log], f"--part test: raw files such as {log} have no parts; leave it"),
    ):
        assert words in refused(tmp_path, trained_run, *inputs, tmp_path / "s.parquet")
    for column in ("user", "when"):
        write_movies(log, rows_of_test_part().drop(columns=column))
        said = refused(tmp_path, trained_run, log, tmp_path / "s.parquet")
        assert f"log.csv: no column {column!r}; its header line has rating" in said


@pytest.mark.parametrize(
    "name, told",
    [
        ("manifest.json", "manifest.json"),
        ("learned/learned.json", "learned/learned.json"),
        ("learned/user.parquet", "learned/"),
    ],
)
def test_what_a_run_kept_is_damaged(run, tmp_path, log, name, told):
    (run / "inputs" / name).write_text("{")
    for said in refused_by_both(tmp_path, run, log):
        assert f"{run}/inputs/{told}" in said and "damaged" in said
        assert f"delete {run}/inputs to use the run's prepared data" in said
        assert "prepare" not in said.replace("prepared data", "")
    # After that, the prepared data are used.
    shutil.rmtree(run / "inputs")
    assert len(scores(run, [log], tmp_path))


@pytest.mark.slow
def test_own_data_whose_paths_are_relative(tmp_path, monkeypatch):
    prepare_movies(tmp_path)
    monkeypatch.chdir(tmp_path)
    run = train_on_movies(
        tmp_path, "data.path=log.csv", "data.schema_file=schema.yaml", "data.cache=cache"
    )
    assert predict(run, "@run", tmp_path / "s.parquet")[0] == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    # What raw files need is in the run.
    assert predict(run, tmp_path / "log.csv", tmp_path / "raw.parquet")[0] == 0
    said = refused(tmp_path, run, "@run", tmp_path / "t.parquet")
    assert "schema.yaml" in said
    assert f"relative paths in {run}/config.yaml are relative to the folder where the run" in said
    assert f"this is {tmp_path}/elsewhere" in said


def test_what_a_run_kept_is_compared_with_its_checkpoint(run, log, tmp_path):
    apply_learned(run / "inputs", str(log), WritingOptions(), tmp_path / "prepared")
    expected = scores(run, [log], tmp_path)
    swap_users(run / "inputs")
    for said in refused_by_both(tmp_path, run, log):
        assert "inputs: these are not the vocabularies that " in said
        assert "epoch_0001 was trained with" in said and said.count("\n") == 1
        assert f"delete {run}/inputs to use the run's prepared data" in said
    # A prepared folder has vocabularies of its own.
    assert scores(run, [tmp_path / "prepared"], tmp_path).equals(expected.drop("file"))
    shutil.rmtree(run / "inputs")
    assert scores(run, [log], tmp_path).equals(expected)


def test_prepared_data_are_compared_with_the_checkpoint(tmp_path):
    run, log = train_on_movies(prepare_movies(tmp_path)), tmp_path / "log.csv"
    (data,) = (tmp_path / "cache").iterdir()
    swap_users(data)
    sign_learned(data)
    for given in ("@run", data):
        said = refused(tmp_path, run, given, tmp_path / "s.parquet")
        assert f"{data}: these are not the vocabularies that " in said
        assert "score raw files, or prepare them with `stampede apply`" in said
    assert len(scores(run, [log], tmp_path))
    other = prepared(
        tmp_path / "other",
        "table",
        str(write_movies(log, movies(700))),
        schema=str(tmp_path / "schema.yaml"),
    )
    said = refused(tmp_path, run, other, tmp_path / "s.parquet")
    assert "rows of the field 'user', where " in said and "stampede apply" in said
    shutil.rmtree(run / "inputs")
    shutil.rmtree(tmp_path / "cache")
    said = refused(tmp_path, run, log, tmp_path / "s.parquet")
    assert "the run kept no vocabularies" in said and "not prepared yet" in said


def test_outputs_that_cannot_be_written(trained_run, tmp_path, log, monkeypatch):
    parquet = write_movies(tmp_path / "log.parquet", rows_of_test_part())
    (tmp_path / "folder.parquet").mkdir()
    (tmp_path / "old.parquet").write_text("old")
    old = (trained_run, log, tmp_path / "old.parquet")
    for given, words in (
        (
            (trained_run, log, tmp_path / "s.txt"),
            "write a NAME.parquet or NAME.csv for the scores\n",
        ),
        (old, "already exists; write --overwrite, or another name"),
        ((trained_run, log, tmp_path / "folder.parquet", "--overwrite"), "is a folder"),
        ((trained_run, log, log / "s.parquet"), "cannot be written (File exists)"),
        ((trained_run, parquet, parquet, "--overwrite"), "log.parquet: is also an input"),
    ):
        assert words in refused(tmp_path, *given)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(pyarrow.parquet.ParquetWriter, "write_table", full)
        said = refused(tmp_path, *old, "--overwrite")
    assert "cannot be written (No space left on device); make room" in said
    assert predict(*old, "--overwrite")[0] == 0
    assert len(pyarrow.parquet.read_table(tmp_path / "old.parquet")) == 60


def test_code_that_a_run_folder_names_is_not_executed_unasked(run, tmp_path):
    executed = tmp_path / "executed"
    (run / "own.py").write_text(f"open({str(executed)!r}, 'w').close()\nraise SystemExit(3)")
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["model"]["import"] = "own.py"
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    out, package = tmp_path / "s.parquet", tmp_path / "package"
    for main, rest in ((command.main, ["@run", out]), (export.main, [package])):
        status, said = run_command(main, run, *rest)
        assert status == 2 and not executed.exists()
        assert "config.yaml: its network is Python code, 'own.py', which would be executed" in said
        assert "write --allow-import if you trust it" in said
        status, said = run_command(main, run, *rest, "--allow-import")
        assert status == 2 and executed.exists() and "own.py, line 2: SystemExit: 3" in said
        executed.unlink()


ALLOWED = "--allow-import"
FLIPPED = NUMBERS_ONLY.replace("return self", "return -self")


@pytest.mark.wide
def test_a_run_keeps_its_networks_file_and_refuses_another(tmp_path):
    network = own_network(tmp_path, "numbers_only", NUMBERS_ONLY)
    run_small(tmp_path, network)
    own, run = tmp_path / "own.py", tmp_path / "small"
    longer = ["train.epochs=2", "checkpoint.resume=auto"]
    before = scores(run, ["@run"], tmp_path, ALLOWED)

    def refused_for(words):
        for said in refused_by_both(tmp_path, run, "@run", ALLOWED):
            assert str(own) in said and str(run / "network.py") in said and words in said

    # A file that has changed is not executed.
    own.write_text(FLIPPED + f"\nopen({str(tmp_path / 'executed')!r}, 'w')\n")
    refused_for("own.py has changed since")
    assert not (tmp_path / "executed").exists()
    own.write_text(FLIPPED)
    with pytest.raises(RunFolderError, match=r"own.py has changed since .*small was trained"):
        run_small(tmp_path, [*network, *longer])
    own.write_bytes((run / "network.py").read_bytes())
    assert scores(run, ["@run"], tmp_path, ALLOWED).equals(before)
    # Runs of older versions kept no copy; they are used unchecked, and keep one when continued.
    (run / "network.py").unlink()
    assert scores(run, ["@run"], tmp_path, ALLOWED).equals(before)
    run_small(tmp_path, [*network, *longer])
    assert (run / "network.py").read_text() == NUMBERS_ONLY
    own.rename(tmp_path / "renamed.py")
    refused_for("is missing; the run has a copy")
    # The same file may be in another place.
    moved = [f"model.import={tmp_path}/renamed.py", *network[1:]]
    run_small(tmp_path, [*moved, "train.epochs=3", "checkpoint.resume=auto"])
    assert len(scores(run, ["@run"], tmp_path, ALLOWED))


@pytest.mark.slow
def test_the_executed_file_is_kept_even_if_it_changes_meanwhile(tmp_path):
    network = own_network(tmp_path, "numbers_only", NUMBERS_ONLY)
    config = small_config(tmp_path, *network)
    (tmp_path / "own.py").write_text(FLIPPED)
    train(config)
    assert (tmp_path / "small/network.py").read_text() == NUMBERS_ONLY
    # A run that begins again keeps what it executes.
    for path in (tmp_path / "small/checkpoints").iterdir():
        path.rename(tmp_path / path.name)
    (tmp_path / "small/summary.json").unlink()
    run_small(tmp_path, [*network, "checkpoint.resume=auto"])
    assert (tmp_path / "small/network.py").read_text() == FLIPPED
