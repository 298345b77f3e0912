"""Networks of a user's own, by `model.import`."""

import json

import pytest
import yaml

from stampede.engine.config.load import load_config
from stampede.models import network
from stampede.settings import SettingsError
from support.forked import run_program
from support.jobs import SMALL
from support.paths import ROOT
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


def load(job, *overrides):
    return load_config(job, list(overrides))


def mistake(job, *overrides):
    with pytest.raises(SettingsError) as failure:
        load(job, *overrides)
    return str(failure.value)


def test_its_networks_are_known_with_their_options(job):
    config = load(job, "model.options.power=2")
    assert config.model.options.power == 2
    assert config.model.import_file == str(job.parent / "own.py")
    assert network("own").module.__name__ == "Own"
    said = mistake(job, "model.options.pwer=2")
    assert "model.options.pwer: unknown key with name: own; did you mean 'power'?" in said
    said = mistake(job, "model.options.power=0")
    assert "model.options.power: found 0; write a number greater than or equal to 1" in said
    # A changed file is executed again.
    (job.parent / "own.py").write_text(OWN.replace("Field(1", "Field(7"))
    assert load(job).model.options.power == 7


def test_the_working_folder_comes_before_that_of_the_configuration(job, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load(job).model.import_file == str(job.parent / "own.py")
    (tmp_path / "own.py").write_text(OWN)
    assert load(job).model.import_file == str(tmp_path / "own.py")


def test_two_files_cannot_have_a_network_of_the_same_name(job):
    load(job)
    (job.parent / "other.py").write_text(OWN + "# another one")
    said = mistake(job, "model.import=other.py")
    assert "own.py has a network of that name; choose another" in said


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
    own.unlink()
    if text is not None:
        own.write_text(text)
    said = mistake(job)
    for word in ["model.import" if "owm" not in str(words) else "job.yaml", *words]:
        assert word in said


def test_mistakes_in_the_key(job):
    job.write_text("model: {import: own.py}")
    assert "own.py is given without model.name; write model.name: own" in mistake(job)


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
