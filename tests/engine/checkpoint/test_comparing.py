"""Configurations of other versions: keys that a checkpoint lacks, and keys that only it has."""

from copy import deepcopy

import pytest
import yaml

from stampede.engine.checkpoint import changes, newest
from stampede.engine.config.load import load_config, with_defaults
from stampede.engine.errors import RunFolderError
from stampede.engine.inference.trained import open_trained
from stampede.engine.processes import processes
from stampede.settings import SettingsError
from support.checkpoints import sign, values_of, write_checkpoint
from support.jobs import run_small, small_config

RESUME = ["checkpoint.resume=auto", "train.epochs=2"]


def without(values, dotted):
    """A configuration of a version that had no such key."""
    section = values
    *sections, key = dotted.split(".")
    for name in sections:
        section = section[name]
    del section[key]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The newest checkpoint of a run."""
    folder = tmp_path_factory.mktemp("run")
    run_small(folder, [])
    return newest(folder / "small/checkpoints")


@pytest.fixture
def changed(saved):
    """What is told of changes, once a configuration was saved without some keys."""
    before = values_of(saved)

    def told(absent, *overrides):
        values = deepcopy(before)
        for key in absent:
            without(values["config"], key)
        sign(saved, values)
        with processes("cpu") as here:
            return changes(saved, small_config(saved.parents[2], *overrides), here)

    yield told
    sign(saved, before)


@pytest.mark.parametrize("key, other", [
    ("train.precision", "bf16"), ("optim.embedding.eps_placement", "torch"),
    ("optim.dense.betas", "[0.8, 0.999]"), ("optim.embedding.clip.ratio", "0.5"),
    ("optim.embedding.clip", "null"), ("evaluate.select_on", "test"), ("data.zipf", "1.5"),
    ("optim.scaling", "{rule: none}"), ("model.dim", "6"), ("model.name", "wide_deep"),
    ("optim.embedding.optimizer", "rowwise_adam"),
])  # fmt: skip
def test_a_key_that_came_later_had_its_default(changed, key, other):
    is_kind = key.endswith((".name", ".optimizer"))
    if not is_kind:
        assert changed([key]) == []
    with pytest.raises(RunFolderError, match=rf"{key}[.\w]*: .* in the checkpoint, .* now"):
        changed([key], f"{key}={other}")


def test_the_line_has_the_default(changed):
    with pytest.raises(RunFolderError) as refusal:
        changed(["train.precision"], "train.precision=bf16")
    lines = str(refusal.value).splitlines()[1:-1]
    assert lines == ["  train.precision: 'fp32' in the checkpoint, 'bf16' now"]


def test_a_harmless_key_that_came_later(changed):
    assert changed(["train.timing_every"], "train.timing_every=7") == [
        "train.timing_every: 500 in the checkpoint, 7 now"
    ]


def test_a_section_of_another_kind_has_no_defaults(tmp_path):
    config = small_config(tmp_path, "optim.embedding.optimizer=helen")
    saved = {"optim": {"embedding": {"optimizer": "adam", "lr": 1.0}}, "gone": 1}
    filled = with_defaults(saved, config)
    assert filled["optim"]["embedding"] == saved["optim"]["embedding"] and filled["gone"] == 1
    assert filled["optim"]["scaling"] == {"rule": None, "base_batch_size": None}
    assert filled["train"]["on_nonfinite"] == "error"


def test_a_checkpoint_of_a_version_without_a_key_is_continued(tmp_path, capsys):
    run_small(tmp_path, [])
    path = newest(tmp_path / "small/checkpoints")
    values = values_of(path)
    for key in ("train.precision", "train.on_divergence", "evaluate.group_by"):
        without(values["config"], key)
    sign(path, values)
    run_small(tmp_path, RESUME)
    told = [line for line in capsys.readouterr().out.splitlines() if "changed since" in line]
    assert told == ["changed since then: train.epochs: 1 in the checkpoint, 2 now"]


def with_foreign_keys(folder, section):
    """A checkpoint with many keys that no version has."""
    path = write_checkpoint(folder / "epoch_0001")
    values = values_of(path)
    values["config"] = small_config(folder).model_dump(mode="json")
    values["config"].setdefault(section, {}).update({f"a{n:05}": n for n in range(50_000)})
    sign(path, values)
    return path


def of_many_the_first(lines, section):
    foreign = [line.strip() for line in lines if ".a0" in line]
    assert len(foreign) == 20 and foreign[19] == f"{section}.a00019: 19 in the checkpoint, None now"
    return any("49,980 more of this kind" in line for line in lines)


def test_of_many_foreign_keys_the_first_are_told(tmp_path):
    """Those of `sharding` are free to change."""
    path = with_foreign_keys(tmp_path, "sharding")
    with processes("cpu") as here:
        told = changes(path, small_config(tmp_path), here)
    assert of_many_the_first(told, "sharding")


def test_of_many_keys_that_are_refused_the_first_are_told(tmp_path):
    path = with_foreign_keys(tmp_path, "train")
    config = small_config(tmp_path, "train.batch_size=512", "optim.embedding.l2=0.5")
    with processes("cpu") as here, pytest.raises(RunFolderError) as refusal:
        changes(path, config, here)
    lines = str(refusal.value).splitlines()
    assert of_many_the_first(lines, "train")
    # What the run itself has changed is told all the same.
    assert "  train.batch_size: 256 in the checkpoint, 512 now" in lines
    assert "  optim.embedding.l2: 1e-05 in the checkpoint, 0.5 now" in lines
    assert lines[-1].endswith(f"another run.name, and checkpoint.init_from={path}")


# As versions before this one wrote them.
OLD = {
    "checkpoint": {"force": False},
    "evaluate": {"memory_gb": 2.0},
    "train": {"on_divergence": {"rollbacks": 2, "dense_lr_factor": 0.5}},
}


def test_keys_that_are_gone_are_left_out_of_what_was_saved(tmp_path, capsys):
    run_small(tmp_path, [])
    run, path = tmp_path / "small", newest(tmp_path / "small/checkpoints")
    values = values_of(path)
    file = yaml.safe_load((run / "config.yaml").read_text())
    for config in (values["config"], file):
        config["checkpoint"].update(OLD["checkpoint"])
        config["evaluate"].update(OLD["evaluate"])
        config["train"]["on_divergence"].update(OLD["train"]["on_divergence"])
    sign(path, values)
    (run / "config.yaml").write_text(yaml.safe_dump(file))
    assert open_trained(run).config.train.batch_size == 256
    # A user's own file says them in vain.
    with pytest.raises(SettingsError, match=r"checkpoint\.force: unknown key"):
        load_config(run / "config.yaml")
    run_small(tmp_path, RESUME)
    told = [line for line in capsys.readouterr().out.splitlines() if "changed since" in line]
    assert told == ["changed since then: train.epochs: 1 in the checkpoint, 2 now"]
