"""Which changes of configuration and network a checkpoint allows; tables read without a model."""

import shutil
from copy import deepcopy
from functools import reduce
from operator import getitem

import pytest
import torch

from stampede.engine.checkpoint.manifest import read_manifest
from stampede.engine.checkpoint.resume import changes, load
from stampede.engine.checkpoint.retention import newest
from stampede.engine.checkpoint.tensors import check_same_network
from stampede.engine.errors import RunFolderError
from stampede.engine.processes import processes
from stampede.engine.tables import read_field
from support.checkpoints import sign, small_job, values_of
from support.gathering import gather_field
from support.jobs import run_small, small_config, tensors_of
from support.own_networks import NUMBERS_ONLY, own_network
from support.predicting import predict
from support.warm_starts import weights_name


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
        for dotted in absent:
            *sections, key = dotted.split(".")
            del reduce(getitem, sections, values["config"])[key]
        sign(saved, values)
        with processes("cpu") as here:
            return changes(saved, small_config(saved.parents[2], *overrides), here)

    yield told
    sign(saved, before)


@pytest.mark.slow
def test_a_key_that_came_later_had_its_default(changed):
    keys = ("first_order_scale", "dropout", "normalization", "initial_bias")
    later = [f"model.{key}" for key in keys] + ["optim.dense.weight_decay", "train.precision"]
    later += ["optim.embedding.plateau", "optim.embedding.clip"]
    assert changed(later, "model.initial_bias=zero") == []
    told = changed(["train.timing_every"], "train.timing_every=7", "checkpoint.resume=auto")
    assert told == ["train.timing_every=7 (was 500)"]
    for key, other in (
        ("train.precision", "bf16"), ("optim.embedding.clip", "null"),
        ("model.name", "wide_deep"), ("optim.embedding.optimizer", "rowwise_adam"),
    ):  # fmt: skip
        with pytest.raises(RunFolderError, match=rf"\n  {key}[.\w]*: .* in the checkpoint, .* now"):
            changed([key], f"{key}={other}")


UNUSED = {"ar_alpha": 0.0, "min_shrinkage": 0.1, "begin_again": "never"}


def test_a_run_of_an_earlier_version_goes_on_unless_it_used_a_removed_power(saved):
    before = values_of(saved)

    def told(used=(), start=0):
        values = deepcopy(before)
        embedding = values["config"]["optim"]["embedding"]
        embedding.update(UNUSED, **dict(used))
        embedding["clip"]["quantile"] = None
        values["config"]["train"]["on_divergence"] = {"loss_factor": 3.0, "window": 20}
        values["progress"] |= {"tables_epoch": start, "tables_start": 8 * start}
        values["progress"]["logged_losses"] = [0.7]
        sign(saved, values)
        with processes("cpu") as here:
            return changes(saved, small_config(saved.parents[2]), here)

    try:
        assert told() == []
        with pytest.raises(RunFolderError, match="ar_alpha"):
            told({"ar_alpha": 1.0})
        with pytest.raises(RunFolderError, match=r"began again each epoch .* f7ec6225"):
            told(start=1)
    finally:
        sign(saved, before)


def test_another_network(saved):
    manifest = read_manifest(saved)
    model = {
        name.removeprefix("model."): torch.empty(entry.size)
        for name, entry in manifest.tensors.items()
        if name.startswith("model.")
    }
    check_same_network(saved, manifest, model)
    wide, new = {"bias": torch.empty(3)}, {"network.new": torch.empty(2)}
    less = {name: tensor for name, tensor in model.items() if name != "bias"}
    for other, said in (
        ({**model, **wide}, r"bias: \[1?\] in the checkpoint, \[3\] now"),
        ({**model, **new}, r"network\.new: absent in the checkpoint, \[2\] now"),
        (less, r"bias: \[1?\] in the checkpoint, absent now"),
    ):
        with pytest.raises(RunFolderError, match=rf"differs from the trained one .{said}.*intact"):
            check_same_network(saved, manifest, other)
    # A rank may hold some of the tables.
    tables = [name for name in model if name.startswith("front.ebc")]
    del model[tables[0]]
    check_same_network(saved, manifest, model)


@pytest.mark.slow
def test_a_checkpoint_is_read_without_a_model(tmp_path):
    settings = ["model.first_order_scale=8"]
    run_small(tmp_path, settings)
    folder = tmp_path / "small/checkpoints/epoch_0001"
    with small_job(tmp_path, *settings) as (here, job, _, dataset, _):
        load(folder, job, dataset)
        for field in ("C1", "C3"):
            gathered = gather_field(job.model, field, 10, here)
            for one, other in zip(read_field(folder, field), gathered, strict=True):
                assert torch.equal(one, other)
            stored = tensors_of(folder)[weights_name(field)][:, 10:11]
            assert stored.any() and torch.equal(gathered.first_order, 8 * stored)
    with pytest.raises(RunFolderError, match=r"'C99'.*C1, C2"):
        read_field(folder, "C99")
    with pytest.raises(RunFolderError, match=r"is not a checkpoint.*write a folder such as"):
        read_field(tmp_path, "C1")


@pytest.mark.slow
@pytest.mark.usefixtures("registered")
def test_an_edited_file(tmp_path):
    given = own_network(tmp_path, "numbers_only", NUMBERS_ONLY)
    run_small(tmp_path, given)
    (tmp_path / "small/network.py").unlink()
    layers = "nn.Sequential(nn.Linear(shape.numbers, 4), nn.Linear(4, 1))"
    own_network(
        tmp_path, "numbers_only", NUMBERS_ONLY.replace("nn.Linear(shape.numbers, 1)", layers)
    )
    goes_on = [*given, "train.epochs=2", "checkpoint.resume=auto"]
    with pytest.raises(RunFolderError, match=r"trained one \(network\.layer"):
        run_small(tmp_path, goes_on)
    # The checkpoint was left where it is.
    own_network(tmp_path, "numbers_only", NUMBERS_ONLY)
    run_small(tmp_path, goes_on)


def test_an_edited_configuration(saved, tmp_path):
    run = shutil.copytree(saved.parents[1], tmp_path / "small")
    config = run / "config.yaml"
    text = config.read_text()
    for old, new, name in (
        ("- 16\n  - 16\n", "- 16\n  - 8\n", "network.mlp."),
        ("  dim: 10\n", "  dim: 7\n", "front.ebc"),
    ):
        assert text.count(old) == 1
        config.write_text(text.replace(old, new))
        status, said = predict(run, "@run", tmp_path / "s.parquet")
        assert status == 2 and "the network differs from the trained one" in said
        assert name in said and "delete" not in said
