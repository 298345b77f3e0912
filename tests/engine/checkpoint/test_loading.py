"""What a checkpoint may be continued with: another configuration, another network."""

from copy import deepcopy

import pytest
import yaml

from stampede.engine.checkpoint import changes, newest
from stampede.engine.config.load import load_config, with_defaults
from stampede.engine.errors import RunFolderError
from stampede.engine.inference.trained import open_trained
from stampede.engine.processes import processes
from stampede.models.registry import _NETWORKS
from stampede.settings import SettingsError
from support.checkpoints import sign, values_of
from support.jobs import run_small, small_config
from support.predicting import predict
from support.ranks import run_ranks

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
        "train.timing_every=7 (was 500)"
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
    told = [line for line in capsys.readouterr().out.splitlines() if "new setting" in line]
    assert told == ["new setting: train.epochs=2 (was 1)"]


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
    told = [line for line in capsys.readouterr().out.splitlines() if "new setting" in line]
    assert told == ["new setting: train.epochs=2 (was 1)"]


# A network of a user's own that is edited between two runs.
OWN = """
from torch import nn
from stampede.models import register

@register("own_layers")
class OwnLayers(nn.Module):
    def __init__(self, shape, generator):
        super().__init__()
        self.first = nn.Linear(shape.inputs, 4)
        self.scale = nn.LayerNorm(4)
        self.last = nn.Linear(4, 1)

    def forward(self, embeddings, dense):
        inputs = nn.functional.pad(embeddings.flatten(1), [0, dense.shape[1]])
        return self.last(self.scale(self.first(inputs))).squeeze(1)
"""
# What becomes of the file, and what is said.
EDITS = {
    "width": ("4", "6", r"network.first.\w+ is \[4.*\] in the checkpoint, \[6.*\] now"),
    "renamed": ("last", "end", r"network.end.\w+ \[1.*\] is not in the checkpoint"),
    "removed": ("scale", None, r"network.scale.\w+ \[4\] is only in the checkpoint"),
}


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """Networks that are registered during a test are gone after it."""
    monkeypatch.setattr("stampede.models.registry._NETWORKS", dict(_NETWORKS))


@pytest.fixture
def own(tmp_path):
    """Overrides of a run that was trained, which has no copy of the file."""
    (tmp_path / "own.py").write_text(OWN)
    overrides = [f"model.import={tmp_path}/own.py", "model.name=own_layers"]
    run_small(tmp_path, overrides)
    (tmp_path / "small/network.py").unlink(missing_ok=True)
    return overrides


def edit(path, old, new):
    text = OWN
    if new is None:
        # The layer is gone, and what called it.
        text = text.replace("        self.scale = nn.LayerNorm(4)\n", "")
        old, new = "self.scale(self.first(inputs))", "self.first(inputs)"
    path.write_text(text.replace(old, new))


@pytest.mark.slow
def test_an_edited_file(tmp_path, own):
    goes_on = [*own, "train.epochs=2", "checkpoint.resume=auto"]
    for old, new, said in EDITS.values():
        edit(tmp_path / "own.py", old, new)
        pattern = rf"(?s)differs from the trained one \({said}\).*is intact"
        with pytest.raises(RunFolderError, match=pattern):
            run_small(tmp_path, goes_on)
    # The checkpoint was left where it is.
    (tmp_path / "own.py").write_text(OWN)
    run_small(tmp_path, goes_on)


def test_an_edited_configuration(tmp_path):
    run_small(tmp_path, [])
    config = tmp_path / "small/config.yaml"
    text = config.read_text()
    for old, new, name in (
        ("- 16\n  - 16\n", "- 16\n  - 8\n", "network.mlp."),
        ("  dim: 10\n", "  dim: 7\n", "front.ebc"),
    ):
        assert text.count(old) == 1
        config.write_text(text.replace(old, new))
        status, said = predict(tmp_path / "small", "@run", tmp_path / "s.parquet")
        assert status == 2 and "the network differs from the trained one" in said
        assert name in said and "delete" not in said


def refusal(folder, overrides, world_size):
    """Why a run cannot be used; as a rank of several."""
    with pytest.raises(RunFolderError) as refused:
        run_small(folder, overrides, world_size)
    return str(refused.value)


def test_all_ranks_say_so(tmp_path, own):
    edit(tmp_path / "own.py", *EDITS["width"][:2])
    overrides = [*own, "train.epochs=2", "checkpoint.resume=auto", "sharding.plan=table_wise"]
    said = run_ranks(2, refusal, tmp_path, overrides, 2)
    assert "differs from the trained one" in said[0] and said[0] == said[1]
