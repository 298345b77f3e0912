"""A run that was changed is refused, or goes on by force with what still fits, which is told."""

import json
import shutil

import pytest
import torch

from stampede.engine.checkpoint import newest
from stampede.engine.errors import DivergedError, RunFolderError
from stampede.engine.inference.trained import open_trained
from stampede.models.registry import _NETWORKS
from support.checkpoints import as_first_format, values_of
from support.diverging import poisoned
from support.jobs import run_small, without_times
from support.movie_runs import train_on_movies
from support.movies import MOVIES
from support.other_network import OWN
from support.predicting import predict
from support.preparing import prepared
from support.tampering import sign_learned, swap_users
from support.warm_starts import begun, movie_folder, rows_of_ids, tensors_of, weights_name

pytestmark = pytest.mark.slow

FORCE = ["checkpoint.resume=auto", "checkpoint.force=true"]
RESUME = ["checkpoint.resume=auto"]


@pytest.fixture
def folder(tmp_path):
    """A run `movies`, trained for an epoch."""
    train_on_movies(movie_folder(tmp_path / "run"))
    return tmp_path / "run"


def newest_of(folder, run="movies"):
    return newest(folder / run / "checkpoints")


def states_of(tensors, kind):
    return {name: tensor for name, tensor in tensors.items() if name.startswith(kind)}


def test_without_a_change_it_goes_on_as_ever(folder, capsys):
    shutil.copytree(folder / "movies", folder / "forced")
    train_on_movies(folder, "train.epochs=2", *RESUME)
    capsys.readouterr()
    train_on_movies(folder, "train.epochs=2", *FORCE, "run.name=forced")
    assert "FORCED" not in capsys.readouterr().out
    assert without_times(folder / "forced") == without_times(folder / "movies")
    assert not (folder / "forced/forced.json").exists()


def test_another_scale_of_the_first_order_term(folder):
    settings = ["train.epochs=2", "model.first_order_scale=4"]
    with pytest.raises(RunFolderError, match=r"first_order_scale: 1\.0 in the checkpoint, 4"):
        train_on_movies(folder, *settings, *RESUME)
    before = tensors_of(newest_of(folder))
    path, _, report = begun(folder, [*settings, *FORCE])
    found = tensors_of(path)
    slot, numbers = weights_name("slot"), "model.number_weights.weight"
    assert torch.equal(found[slot][:, 10] * 4, before[slot][:, 10])
    assert torch.equal(found[numbers] * 4, before[numbers])
    # Moments are those of other gradients.
    assert set(report["new"].values()) == {"model.first_order_scale was 1, now 4"}
    assert not any(t.any() for n, t in found.items() if not n.startswith("model."))


def test_another_vocabulary(folder, capsys):
    """The same rows, but ids that are seen once have a row now."""
    before = tensors_of(newest_of(folder))
    then, step = rows_of_ids(folder), values_of(newest_of(folder))["progress"]["step"]
    schema = MOVIES.replace("min_count: 2", "min_count: 1")
    movie_folder(folder, schema=schema)
    said = (
        r"(?s)rows differ.*vocabulary_sha256: '\w+' in .*"
        r"sizes.user: \d+ in the checkpoint, \d+ now.*write checkpoint.force=true"
    )
    with pytest.raises(RunFolderError, match=said):
        train_on_movies(folder, "train.epochs=2", *RESUME)
    path, lines, report = begun(folder, ["train.epochs=2", *FORCE])
    found, now = tensors_of(path), rows_of_ids(folder)
    assert now["user"].keys() > then["user"].keys()
    checked = 0
    for name, tensor in found.items():
        field = name.split(".")[4].removeprefix("t_") if ".t_" in name else ""
        if field in now and tensor.ndim:
            for text, row in now[field].items():
                if text in then[field]:
                    assert torch.equal(tensor[row], before[name][then[field][text]])
                    checked += 1
                elif name.startswith("fused."):
                    assert not tensor[row].any()
        else:
            assert torch.equal(tensor, before[name])
    assert checked > 100
    assert any(found[name].any() for name in states_of(found, "fused.") if ".t_user." in name)
    assert report["step"] == step and values_of(path)["progress"]["step"] == step
    assert not report["new"] and not report["dropped"]
    told = "\n".join(lines)
    assert f"FORCED (checkpoint.force): continuing after step {step:,} from" in told
    assert "CHANGED data: vocabulary_sizes.user: " in told
    capsys.readouterr()
    train_on_movies(folder, "train.epochs=2", *FORCE)
    said = capsys.readouterr().out
    assert "CHANGED data: vocabulary_sizes.user: " in said
    assert json.loads((folder / "movies/forced.json").read_text())["step"] == step
    # From here on nothing is changed, so nothing is forced.
    train_on_movies(folder, "train.epochs=3", *RESUME)
    assert "continuing after step" in capsys.readouterr().out
    # Both checkpoints find the vocabulary that they were trained with.
    run = folder / "movies"
    for epoch in (1, 3):
        trained = (
            open_trained(run, str(epoch))
            if (run / f"checkpoints/epoch_{epoch:04d}").exists()
            else None
        )
        if trained is not None:
            status, said = predict(
                trained.checkpoint, folder / "log.csv", folder / f"{epoch}.parquet"
            )
            assert status == 0, said


def test_a_forced_run_that_is_killed_before_it_saves_finds_the_first_vocabulary(folder):
    """The inputs are the new ones by then, the checkpoint is that of the old ones."""
    before, then = tensors_of(newest_of(folder)), rows_of_ids(folder)
    kept = (folder / "movies/inputs/learned/user.parquet").read_bytes()
    movie_folder(folder, schema=MOVIES.replace("min_count: 2", "min_count: 1"))
    train_on_movies(folder, "train.epochs=2", "checkpoint.keep=5", *FORCE)
    assert (folder / "movies/inputs/learned/user.parquet").read_bytes() != kept
    shutil.rmtree(folder / "movies/checkpoints/epoch_0002")
    found, now = tensors_of(begun(folder, ["train.epochs=2", *FORCE])[0]), rows_of_ids(folder)
    name = weights_name("user")
    for text, row in then["user"].items():
        assert torch.equal(found[name][now["user"][text]], before[name][row])
    # And scores are those of its own vocabulary.
    status, said = predict(
        folder / "movies/checkpoints/epoch_0001", folder / "log.csv", folder / "s.parquet"
    )
    assert status == 0, said


def swapped(data, copy):
    """The same prepared data, but two users have each other's row."""
    shutil.copytree(data, copy)
    swap_users(copy)
    sign_learned(copy)
    return copy


def test_a_vocabulary_of_the_same_size_is_another_one(tmp_path):
    folder = movie_folder(tmp_path / "run")
    data = prepared(tmp_path / "one", "table", str(folder / "log.csv"),
                    schema=str(folder / "schema.yaml"))  # fmt: skip
    other = swapped(data, tmp_path / "other")
    same = shutil.copytree(data, tmp_path / "same")
    # Nothing of `job` that a prepared folder has no use for.
    settings = ["data.kind=prepared", "run.name=small", "evaluate.select_on=test"]
    config = folder / "small.yaml"
    config.write_text("")

    def train(path, *more):
        from stampede.engine.config import load_config
        from stampede.engine.run import run

        run(load_config(config, [f"run.dir={folder}", f"data.path={path}", *settings,
                                 "model.hidden=[8]", "train.batch_size=64", *more]))  # fmt: skip

    train(data)
    train(same, "train.epochs=2", *RESUME)
    with pytest.raises(RunFolderError) as refusal:
        train(other, "train.epochs=3", *RESUME)
    said = str(refusal.value)
    assert "tables have as many rows, but their ids or the ranges of numbers are others" in said
    hashes = [values_of(newest_of(folder, "small"))["data"]["vocabulary_sha256"]]
    assert said.count("in the checkpoint") == 1 and f"'{hashes[0]}' in the checkpoint" in said
    before = tensors_of(newest_of(folder, "small"))
    train(other, "train.epochs=3", *FORCE, "optim.embedding.lr=0", "optim.embedding.l2=0",
          "optim.embedding.rows=touched")  # fmt: skip
    after = tensors_of(newest_of(folder, "small"))
    hashes.append(values_of(newest_of(folder, "small"))["data"]["vocabulary_sha256"])
    assert len(set(hashes)) == 2
    name = weights_name("user")
    assert torch.equal(after[name][[3, 2]], before[name][[2, 3]])
    assert torch.equal(after[name][4:], before[name][4:])
    assert not torch.equal(before[name][2], before[name][3])


def test_another_optimizer_of_the_tables(folder, capsys):
    change = ["train.epochs=2", "optim.embedding.optimizer=adagrad"]
    with pytest.raises(RunFolderError, match=r"optimizer: 'adam' in the checkpoint, 'adagrad' now"):
        train_on_movies(folder, *change, *RESUME)
    before = tensors_of(newest_of(folder))
    path, lines, report = begun(folder, [*change, *FORCE])
    found = tensors_of(path)
    # Adagrad's sum would be as large as Adam's first moment, and has its name.
    moments = states_of(found, "fused.")
    assert any(name in before and tensor.ndim == 2 for name, tensor in moments.items())
    assert not any(tensor.any() for tensor in moments.values())
    assert report["dropped"].keys() == states_of(before, "fused.").keys()
    why = {*report["dropped"].values(), *report["new"].values()}
    assert why == {"optim.embedding.optimizer was adam, now adagrad"}
    for kind in ("model.", "dense."):
        for name, tensor in states_of(found, kind).items():
            assert torch.equal(tensor, before[name])
    assert "not taken: " in "\n".join(lines)
    train_on_movies(folder, *change, *FORCE)
    assert "CHANGED optim.embedding.optimizer: 'adam' in the checkpoint, 'adagrad' now" in (
        capsys.readouterr().out
    )


def test_another_dim_and_width(folder):
    before = tensors_of(newest_of(folder))
    fresh = tensors_of(
        begun(folder, ["model.dim=6", "model.hidden=[16,8]", "run.name=f"], name="f")[0]
    )
    path, _, report = begun(
        folder, ["train.epochs=2", "model.dim=6", "model.hidden=[16,8]", *FORCE]
    )
    found = tensors_of(path)
    assert {one["why"] for one in report["fields"]} == {"dim was 10, now 6"}
    tables = [weights_name(one["field"]) for one in report["fields"]]
    for name, tensor in found.items():
        if name in report["loaded"]:
            assert torch.equal(tensor, before[name])
        else:
            # Moments of a layer that begins anew do so with their number of steps.
            assert torch.equal(tensor, fresh[name])
            assert name in report["new"] or name in tables
    by_parameter = {
        kind: {name.rpartition(".")[0] for name in report[kind] if name.startswith("dense.")}
        for kind in ("new", "loaded")
    }
    assert all(by_parameter.values()) and not by_parameter["new"] & by_parameter["loaded"]
    assert values_of(newest_of(folder))["progress"]["best_epoch"] == 1
    assert values_of(path)["progress"]["best_epoch"] == 0
    train_on_movies(folder, "train.epochs=2", "model.dim=6", "model.hidden=[16,8]", *FORCE)
    # The best epoch is one that this network has.
    status, said = predict(folder / "movies", "@run", folder / "s.parquet")
    assert status == 0, said


def test_the_position_in_an_epoch(tmp_path):
    """It is kept where rows come in the same order, else the epoch begins again."""
    stopped = ["checkpoint.every_steps=2", "train.epochs=2", "checkpoint.keep=9"]
    run_small(tmp_path, ["checkpoint.every_steps=2", "checkpoint.keep=9"])
    folder = tmp_path / "small/checkpoints"
    shutil.rmtree(folder / "epoch_0001")
    last = newest(folder)
    progress = values_of(last)["progress"]
    done = progress["reader"]["samples"]
    assert progress["step"] == 6 and done == 6 * 256
    keep = tmp_path / "kept"
    shutil.copytree(tmp_path / "small", keep)
    run_small(tmp_path, [*stopped, *FORCE, "optim.embedding.l2=1e-3"])
    summary = json.loads((tmp_path / "small/summary.json").read_text())
    assert summary["steps"] == 16
    for change, samples in (("train.batch_size=128", 1900), ("data.rows=1500", 1425)):
        shutil.rmtree(tmp_path / "small")
        shutil.copytree(keep, tmp_path / "small")
        run_small(tmp_path, [*stopped, *FORCE, change])
        summary = json.loads((tmp_path / "small/summary.json").read_text())
        batch = 128 if "128" in change else 256
        assert summary["steps"] == 6 + 2 * -(-samples // batch)
        seen = [line["step"] for line in without_times(tmp_path / "small")]
        assert seen == sorted(seen)


def test_the_position_is_told(tmp_path, capsys):
    run_small(tmp_path, ["checkpoint.every_steps=2"])
    shutil.rmtree(tmp_path / "small/checkpoints/epoch_0001")
    capsys.readouterr()
    run_small(tmp_path, [*FORCE, "train.batch_size=128"])
    said = capsys.readouterr().out
    assert "CHANGED train.batch_size: 256 in the checkpoint, 128 now" in said
    assert "epoch 1 begins again with its first sample: the 1,536 samples it had" in said


@pytest.fixture
def registered(monkeypatch):
    """Networks that are registered during a test are gone after it."""
    monkeypatch.setattr("stampede.models.registry._NETWORKS", dict(_NETWORKS))


def test_an_edited_network(tmp_path, registered, capsys):
    (tmp_path / "own.py").write_text(OWN)
    own = [f"model.import={tmp_path}/own.py", "model.name=own_layers"]
    run_small(tmp_path, own)
    (tmp_path / "own.py").write_text(OWN.replace("4", "6"))
    with pytest.raises(RunFolderError, match="is not as it was"):
        run_small(tmp_path, [*own, *RESUME, "train.epochs=2"])
    run_small(tmp_path, [*own, *FORCE, "train.epochs=2"])
    said = capsys.readouterr().out
    assert "own.py is not as it was when" in said and "network: network.first" in said
    # The run has the new file now.
    assert "6" in (tmp_path / "small/network.py").read_text()
    run_small(tmp_path, [*own, *RESUME, "train.epochs=3"])


def test_a_checkpoint_of_the_first_format_is_continued(folder):
    as_first_format(newest_of(folder))
    train_on_movies(folder, "train.epochs=2", *RESUME)
    assert len(values_of(newest_of(folder))["data"]["vocabulary_sha256"]) == 64


def test_a_run_that_diverges_before_it_saved_is_not_put_back_to_before_the_change(
    tmp_path, monkeypatch
):
    """That checkpoint has Adam's moments, where Adagrad has its sums."""
    run_small(tmp_path, [])
    change = ["train.epochs=2", "optim.embedding.optimizer=adagrad"]
    with monkeypatch.context() as patch:
        poisoned(patch, [9], 1e-5)
        with pytest.raises(DivergedError, match=r"nan at step 9.*rolled back once"):
            run_small(tmp_path, [*FORCE, *change, "train.on_divergence.rollbacks=1"])
    (saved,) = (tmp_path / "small/checkpoints").iterdir()
    values = values_of(saved)
    assert values["progress"]["step"] == 8
    assert values["config"]["optim"]["embedding"]["optimizer"] == "adagrad"
    run_small(tmp_path, [*FORCE, *change])


def test_a_run_on_other_data_that_diverges_before_it_saved_is_rolled_back(tmp_path, monkeypatch):
    run_small(tmp_path, [])
    poisoned(monkeypatch, [9], 4e-4)
    more = ["train.epochs=2", "data.rows=1500", "optim.dense.schedule.warmup=0"]
    run_small(tmp_path, [*FORCE, *more, "train.on_divergence.rollbacks=1"])
    assert json.loads((tmp_path / "small/summary.json").read_text())["rollbacks"] == 1
    (line,) = [line for line in without_times(tmp_path / "small") if line["kind"] == "rollback"]
    assert (line["step"], line["diverged_step"]) == (8, 9)
