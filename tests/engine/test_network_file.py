"""Networks of a user's own, by `model.import`; what they may do in training, and what not."""

import json

import pytest
import torch
import yaml
from torch import nn

from stampede.engine.config.load import load_config
from stampede.models import CTRModel, network
from stampede.settings import SettingsError
from support.checkpoints import small_job
from support.forked import run_program
from support.gathering import gather_field
from support.jobs import SMALL, run_small, small_config, train_an_epoch
from support.own_networks import NUMBERS_ONLY, own_network
from support.paths import ROOT
from support.ranks import run_ranks
from support.waiting import HANG

OWN = """
import torch
from torch import nn
from pydantic import Field
from stampede.models import register
from stampede.settings import Section

class Options(Section):
    power: int = Field(1, ge=1, description="of the embeddings")

@register("own", options=Options)
class Own(nn.Module):
    def __init__(self, shape, generator, options):
        super().__init__()
        self.power = options.power
        self.layer = nn.Linear(shape.fields * shape.dim + shape.numbers, 1)

    def forward(self, embeddings, dense):
        inputs = torch.cat([embeddings.flatten(1) ** self.power, dense], 1)
        return self.layer(inputs).squeeze(1)
"""


pytestmark = pytest.mark.usefixtures("registered")


@pytest.fixture
def job(tmp_path):
    """A folder with a configuration, in another one than the working folder."""
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "job.yaml").write_text("model: {import: own.py, name: own}")
    (folder / "own.py").write_text(OWN)
    return folder / "job.yaml"


def mistake(job, *overrides):
    with pytest.raises(SettingsError) as failure:
        load_config(job, overrides)
    return str(failure.value)


def test_its_networks_are_known_with_their_options(job):
    config = load_config(job, ["model.options.power=2"])
    assert config.model.options.power == 2
    assert config.model.import_file == str(job.parent / "own.py")
    assert network("own").module.__name__ == "Own"
    said = mistake(job, "model.options.pwer=2")
    assert "model.options.pwer: unknown key with name: own; did you mean 'power'?" in said
    said = mistake(job, "model.options.power=0")
    assert "model.options.power: found 0; write a number greater than or equal to 1" in said
    # A changed file is executed again.
    (job.parent / "own.py").write_text(OWN.replace("Field(1", "Field(7"))
    assert load_config(job).model.options.power == 7


def test_which_file_is_taken_and_which_do_not_go_together(job, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_config(job).model.import_file == str(job.parent / "own.py")
    # The working folder comes before that of the configuration.
    (tmp_path / "own.py").write_text(OWN)
    assert load_config(job).model.import_file == str(tmp_path / "own.py")
    (job.parent / "other.py").write_text(OWN + "# another one")
    said = mistake(job, "model.import=other.py")
    assert "own.py has a network of that name; choose another" in said
    job.write_text("model: {import: own.py}")
    assert "own.py is given without model.name; write model.name: own" in mistake(job)


@pytest.mark.parametrize(
    "text, words",
    [
        (None, ["found 'own.py', and there is no file", "job/own.py", "write the path"]),
        ("x = (\n", ["own.py, line 1: SyntaxError"]),
        ("\ndef f():\n    return 1 / 0\n\nf()\n", ["own.py, line 3: ZeroDivisionError"]),
        ("x = 1", ["own.py registers no network; write @register('own')"]),
        (OWN.replace('"own"', '"deepfm"'), ["SettingsError: register('deepfm')", "choose another"]),
        (OWN.replace('"own"', '"owm"'), ["model.name: found 'own'", "did you mean 'owm'?"]),
    ],
)
def test_mistakes(job, text, words):
    own = job.parent / "own.py"
    own.unlink() if text is None else own.write_text(text)
    said = mistake(job)
    assert all(word in said for word in words), said


@pytest.mark.slow
def test_a_run_trains_it_says_so_and_goes_on(tmp_path, job):
    config = job.parent / "job.yaml"
    train = [*SMALL, f"run.dir={tmp_path}/runs", "model.options.power=2"]
    done = run_program(ROOT / "launch.py", [str(config), *train], ROOT, timeout=HANG)
    assert done.returncode == 0, done.stderr
    assert f"model.import: {job.parent / 'own.py'} was executed" in done.stdout
    written = tmp_path / "runs/job/config.yaml"
    assert yaml.safe_load(written.read_text())["model"]["options"] == {"power": 2}
    # From what the run folder holds, and with the file in another place.
    moved = job.parent.rename(tmp_path / "moved") / "own.py"
    goes_on = ["train.epochs=2", "checkpoint.resume=auto", f"model.import={moved}"]
    done = run_program(ROOT / "launch.py", [str(written), *goes_on], ROOT, timeout=HANG)
    assert done.returncode == 0, done.stderr
    assert "continuing after step" in done.stdout
    assert json.loads((tmp_path / "runs/job/summary.json").read_text())["epochs"] == 2


# In one tile, and in several.
@pytest.mark.slow
@pytest.mark.parametrize("tile_rows", [8192, 100])
def test_unused_embeddings_are_not_trained(tmp_path, monkeypatch, tile_rows):
    monkeypatch.setattr("stampede.engine.step.TILE_ROWS", tile_rows)
    overrides = own_network(tmp_path, "numbers_only", NUMBERS_ONLY)
    overrides += ["data.rows=6000", "train.batch_size=256", "optim.embedding.l2=0"]
    with small_job(tmp_path, *overrides) as (here, job, config, dataset, _):
        before = {f: gather_field(job.model, f, 10, here) for f in dataset.vocabulary_sizes}
    trained = train_an_epoch(config)
    assert trained.losses[-1] < 1 and trained.evaluation["auc"] > 0.5
    for field, weights in before.items():
        assert torch.equal(trained.tables[field].embedding, weights.embedding)


@pytest.mark.parametrize(
    "line, changed",
    [
        ("embeddings[:, 0] = 1.0", "embeddings"),
        ("nn.functional.relu(embeddings.view(len(dense), -1), inplace=True)", "embeddings"),
        ("dense.add_(1)", "numbers"),
    ],
)
def test_a_network_that_changes_its_inputs_is_refused(tmp_path, line, changed):
    text = NUMBERS_ONLY.replace("        return", f"        {line}\n        return")
    said = f"the network 'numbers_only' changes its {changed} in place; its forward must not: write"
    with pytest.raises(SettingsError, match=said):
        run_small(tmp_path, own_network(tmp_path, "numbers_only", text))


def test_trying_a_network_leaves_its_state_alone(tmp_path):
    text = NUMBERS_ONLY.replace("nn.Linear(shape.numbers, 1)", "nn.Sequential(nn.BatchNorm1d("
                                "shape.numbers), nn.Linear(shape.numbers, 1))")  # fmt: skip
    small_config(tmp_path, *own_network(tmp_path, "numbers_only", text))
    model = CTRModel("numbers_only", {"a": 7}, 3, 4, [8], 0)
    norm = next(module for module in model.modules() if isinstance(module, nn.BatchNorm1d))
    assert norm.training and norm.num_batches_tracked == 0 and norm.running_var.eq(1).all()


# Notes a number that is drawn in each forward of the training.
DRAWING = """
import torch
from torch import nn
from stampede.models import register

DRAWN = []

@register("dropping")
class Dropping(nn.Module):
    def __init__(self, shape, generator):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(shape.fields * shape.dim, 16), nn.Dropout(0.3), nn.Linear(16, 1)
        )

    def forward(self, embeddings, dense):
        if self.training and torch.is_grad_enabled() and len(dense) > 32:
            DRAWN.append(torch.rand(()).item())
        return self.layers(embeddings.flatten(1)).squeeze(1)
"""


def drawn_in_training(folder, overrides, world_size):
    """What each step of an epoch of `DRAWING` drew; also as a rank of several."""
    # Seven whole batches.
    config = small_config(
        folder, "data.rows=1792", "evaluate.select_on=test", *overrides, world_size=world_size
    )
    train_an_epoch(config)
    return network("dropping").module.__init__.__globals__["DRAWN"]


@pytest.mark.slow
def test_ranks_and_steps_drop_different_samples(tmp_path):
    network = own_network(tmp_path, "dropping", DRAWING)
    drawn = run_ranks(2, drawn_in_training, tmp_path, network, 2)
    assert [len(of_rank) for of_rank in drawn] == [7, 7]
    assert len({value for of_rank in drawn for value in of_rank}) == 14
