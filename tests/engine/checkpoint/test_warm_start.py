"""A new run starts from the weights of another: rows by their ids, layers by name and shape."""

import json
import pickle
import shutil

import polars as pl
import pytest
import torch

from stampede.data import DataError
from stampede.data.prepared.manifest import read_manifest as read_prepared
from stampede.engine.checkpoint.retention import delete_all, newest
from stampede.engine.checkpoint.warm_start import open_source
from stampede.engine.config.load import load_config
from stampede.engine.errors import RunFolderError
from stampede.engine.reading import data_folder
from stampede.engine.tables import read_field
from support.checkpoints import sign, values_of
from support.jobs import run_small, tensors_of, without_times
from support.movie_runs import job, train_on_movies
from support.movies import MOVIES
from support.tampering import swap_users
from support.warm_starts import begun, movie_folder, weights_name

# Other buckets, another size and another part of the time.
CHANGED = (
    MOVIES.replace("buckets: 7, seed: 3", "buckets: 9, seed: 3")
    .replace("size: 12", "size: 15")
    .replace("  weekday: {encode: weekday}", "  hour: {encode: hour_of_day}")
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on a log, trained for two epochs."""
    return train_on_movies(movie_folder(tmp_path_factory.mktemp("trained")), "train.epochs=2")


@pytest.fixture
def source(trained, tmp_path):
    """A copy of the run, to be changed."""
    return shutil.copytree(trained, tmp_path / "source")


def rows_of_ids(folder):
    """By field of a run on movies: by text, the row of each id of a vocabulary."""
    config = load_config(folder / "movies.yaml", job(folder))
    data = data_folder(config)
    found = {}
    for entry in read_prepared(data).fields:
        path = data / "learned" / f"{entry.name}.parquet"
        if path.exists():
            texts = pl.read_parquet(path)["value"].to_list()
            found[entry.name] = {None: 0, "unseen": 1} | {t: i + 2 for i, t in enumerate(texts)}
    return found


def fields_of(report):
    return {one["field"]: one for one in report["fields"]}


@pytest.mark.slow
def test_rows_go_by_their_ids(trained, tmp_path):
    """The log has grown: ids come in another order, some are new, some are gone."""
    folder = movie_folder(tmp_path / "new", 900)
    fresh = tensors_of(begun(folder, ["run.seed=5"], name="fresh")[0])
    path, _, report = begun(folder, ["run.seed=5", f"checkpoint.init_from={trained}"])
    found, saved = tensors_of(path), tensors_of(trained / "checkpoints/epoch_0002")
    then, now = rows_of_ids(trained.parent), rows_of_ids(folder)
    assert then["user"] != now["user"] and then["movie"] != now["movie"]
    for field, rows in now.items():
        name, was = weights_name(field), then[field]
        for text, row in rows.items():
            expected = saved[name][was[text]] if text in was else fresh[name][row]
            assert torch.equal(found[name][row], expected)
        common = len(rows.keys() & was.keys())
        assert fields_of(report)[field] == {
            "field": field, "rows": len(rows), "loaded": common, "new": len(rows) - common,
            "dropped": len(was) - common, "why": "",
        }  # fmt: skip
    # Some were the same, some others.
    users = fields_of(report)["user"]
    assert users["loaded"] > 10 and users["new"] and users["dropped"] < users["loaded"]
    for field in ("city", "slot", "weekday"):
        assert torch.equal(found[weights_name(field)], saved[weights_name(field)])
    for name, tensor in found.items():
        if name.startswith("model.") and ".front." not in name:
            assert torch.equal(tensor, saved[name]) and name in report["loaded"]
        elif not name.startswith("model."):
            # A new run's optimizers start from scratch.
            assert not tensor.any() and name in report["new"] and name in report["dropped"]


def test_what_does_not_fit_is_left_out_and_told(trained, tmp_path):
    folder = movie_folder(tmp_path / "new", schema=CHANGED)
    settings = ["model.hidden=[16,8]", "run.seed=5"]
    fresh = tensors_of(begun(folder, settings, name="fresh")[0])
    path, _, report = begun(folder, [*settings, f"checkpoint.init_from={trained}"])
    found, saved = tensors_of(path), tensors_of(trained / "checkpoints/epoch_0002")
    fields = fields_of(report)
    assert fields["city"]["why"] == "hashed into 7 buckets with seed 3, now 9 with seed 3"
    assert fields["hour"]["why"] == "not in the checkpoint" and fields["hour"]["new"] == 25
    assert fields["weekday"]["why"] == "not in this run" and fields["weekday"]["dropped"] == 8
    for field in ("city", "hour"):
        assert torch.equal(found[weights_name(field)], fresh[weights_name(field)])
    slot = weights_name("slot")
    # The row of a missing value is the one after the last.
    expected = torch.cat([saved[slot][:12], fresh[slot][12:15], saved[slot][12:]])
    assert torch.equal(found[slot], expected)
    layers = {name: why for name, why in report["new"].items() if name.startswith("model.")}
    assert set(layers.values()) == {"was [16, 16], now [8, 16]", "was [16], now [8]",
                                    "was [1, 16], now [1, 8]"}  # fmt: skip
    assert all(torch.equal(found[name], fresh[name]) for name in layers)
    first = [name for name in report["loaded"] if found[name].ndim == 2]
    assert first and all(torch.equal(found[name], saved[name]) for name in first)


def test_another_scale_of_the_first_order_term(trained, tmp_path):
    """Weights are stored so much smaller that scores stay what they were."""
    folder, source = movie_folder(tmp_path / "new"), trained / "checkpoints/epoch_0002"
    path, _, report = begun(folder, ["model.first_order_scale=4", f"checkpoint.init_from={source}"])
    found, saved = tensors_of(path), tensors_of(source)
    for field in fields_of(report):
        one, other = read_field(path, field), read_field(source, field)
        assert torch.equal(one.embedding, other.embedding)
        assert torch.equal(one.first_order, other.first_order)
    slot = weights_name("slot")
    assert saved[slot][:, 10].any() and torch.equal(found[slot][:, 10] * 4, saved[slot][:, 10])
    name = "model.number_weights.weight"
    assert torch.equal(found[name] * 4, saved[name])


def test_another_dim(trained, tmp_path):
    folder = movie_folder(tmp_path / "new")
    _, lines, report = begun(folder, ["model.dim=6", f"checkpoint.init_from={trained}"])
    assert {one["why"] for one in report["fields"]} == {"dim was 10, now 6"}
    assert not any(one["loaded"] for one in report["fields"])
    assert any("NO ROW of a table was loaded" in line for line in lines)
    # The layers behind the first do not depend on it.
    assert any("network" in name for name in report["loaded"])


@pytest.mark.wide
def test_a_run_is_told_of_it_and_goes_on_from_its_own_checkpoints(source, tmp_path, capsys):
    """A run that is continued does not start again from the other run, which may be gone."""
    folder = movie_folder(tmp_path / "new", 900)
    given = f"checkpoint.init_from={source}"
    whole = train_on_movies(folder, given, "train.epochs=2", "run.name=whole")
    told = json.loads((whole / "init_from.json").read_text())
    assert told["checkpoint"] == str(source / "checkpoints/epoch_0002") and told["step"] > 0
    assert f"weights from {source}/checkpoints/epoch_0002, after step" in capsys.readouterr().out
    parts = train_on_movies(folder, given, "run.name=parts")
    shutil.rmtree(source)
    capsys.readouterr()
    train_on_movies(folder, given, "run.name=parts", "train.epochs=2", "checkpoint.resume=auto")
    said = capsys.readouterr().out
    assert "init_from is not used" in said and "weights from" not in said
    assert without_times(parts) == without_times(whole)
    # Without a checkpoint of its own it needs the other run.
    shutil.rmtree(parts / "checkpoints")
    (parts / "summary.json").unlink()
    with pytest.raises(RunFolderError, match="no such run folder or checkpoint"):
        train_on_movies(folder, given, "run.name=parts", "checkpoint.resume=auto")


@pytest.mark.wide
def test_synthetic_clicks_of_more_ids(tmp_path):
    run_small(tmp_path, [])
    start = tmp_path / "small"
    run_small(tmp_path, [
        f"checkpoint.init_from={start}", "run.name=large", "data.scale=0.001",
        "optim.embedding.lr=0", "optim.dense.lr=0", "optim.embedding.l2=0",
    ])  # fmt: skip
    report = json.loads((tmp_path / "large/init_from.json").read_text())
    grown = [one for one in report["fields"] if one["new"]]
    assert grown and all(one["dropped"] == 0 for one in report["fields"])
    for one in grown:
        saved, now = (
            read_field(folder / "checkpoints/epoch_0001", one["field"])
            for folder in (start, tmp_path / "large")
        )
        rows = one["loaded"]
        assert rows == len(saved.embedding) < len(now.embedding)
        assert torch.equal(now.embedding[:rows], saved.embedding)
        assert torch.equal(now.first_order[:rows], saved.first_order)


def test_what_weights_are_read_from_is_not_deleted_meanwhile(source, tmp_path):
    found = open_source(str(source), tmp_path / "run")
    assert not delete_all(source / "checkpoints")
    assert [path.name for path in (source / "checkpoints").iterdir()] == ["epoch_0002"]
    # Other ranks do not hold it.
    assert pickle.loads(pickle.dumps(found)).held is None
    found.held.close()
    assert delete_all(source / "checkpoints")


def flip(run):
    path = next((run / "checkpoints/epoch_0002").glob("*.distcp"))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


BAD = {
    "no checkpoint": (lambda run: shutil.rmtree(run / "checkpoints"), "has no checkpoint"),
    "a flipped bit": (flip, r"epoch_0002: damaged checkpoint \(.*SHA-256 differs.*; copy it"),
    "no inputs": (lambda run: shutil.rmtree(run / "inputs"),
                  r"epoch_0002: its vocabularies are missing: .*inputs does not.*copy it again"),
    "other inputs": (lambda run: swap_users(run / "inputs"),
                     "these are not the vocabularies that .*epoch_0002 was"),
    "no run": (shutil.rmtree, "checkpoint.init_from: .*source: no such run folder or"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_used_is_said_before_anything_is_written(source, tmp_path, case):
    change, said = BAD[case]
    change(source)
    folder = movie_folder(tmp_path / "new")
    with pytest.raises((RunFolderError, DataError), match=said) as refusal:
        train_on_movies(folder, f"checkpoint.init_from={source}", "run.name=refused")
    assert "\n" not in str(refusal.value)
    assert not (folder / "refused").exists() and not (folder / "cache").exists()


def test_the_run_folder_that_is_to_be_replaced(trained, tmp_path):
    folder = movie_folder(tmp_path / "new")
    run = shutil.copytree(trained, folder / "own")
    given = ["run.name=own", "run.overwrite=true"]
    for start in (run, run / "checkpoints/epoch_0001"):
        with pytest.raises(RunFolderError, match=r"own, where this run starts from scratch; write"):
            train_on_movies(folder, *given, f"checkpoint.init_from={start}")
    assert (run / "checkpoints/epoch_0001").is_dir()


def test_only_the_checkpoint_and_the_vocabularies_are_read(source, tmp_path):
    """The other run's configuration may be gone, and the code of its network is not executed."""
    (source / "config.yaml").unlink()
    path = newest(source / "checkpoints")
    values = values_of(path)
    values["config"]["model"]["import"] = str(tmp_path / "harm.py")
    (tmp_path / "harm.py").write_text(f"open({str(tmp_path / 'harm')!r}, 'w')")
    sign(path, values)
    folder = movie_folder(tmp_path / "new")
    _, _, report = begun(folder, [f"checkpoint.init_from={path}"])
    assert all(one["new"] == 0 for one in report["fields"])
    assert not (tmp_path / "harm").exists()


@pytest.mark.slow
def test_fields_in_another_order(trained, tmp_path):
    """Each table is that of its field; what layers make of them cannot be known."""
    user, movie = (next(line for line in MOVIES.splitlines() if f" {name}:" in line)
                   for name in ("user", "movie"))  # fmt: skip
    schema = MOVIES.replace(user, "A").replace(movie, user).replace("A", movie)
    given = [f"checkpoint.init_from={trained}"]
    path, told, report = begun(movie_folder(tmp_path / "new", schema=schema), given)
    found, saved = tensors_of(path), tensors_of(trained / "checkpoints/epoch_0002")
    for field in ("user", "movie"):
        assert torch.equal(found[weights_name(field)], saved[weights_name(field)])
    assert "were trained on: user, movie, " in " ".join("\n".join(told).split())
    assert "in another order" in report["note"]
    _, _, report = begun(movie_folder(tmp_path / "same"), given)
    assert report["note"] == ""
