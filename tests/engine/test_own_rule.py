"""Jobs with the rule and the clip of a user's own file."""

import pytest
import torch

from stampede.engine.config.load import load_config, load_config_of_run
from stampede.settings import SettingsError
from support.checkpoints import small_job
from support.jobs import lines, run_small
from support.own_rules import FILE
from support.paths import ROOT

pytestmark = pytest.mark.usefixtures("registered")

OWN = [
    f"model.import={FILE}", "optim.embedding.optimizer=lion", "optim.embedding.betas=[0.5,0.75]",
    "optim.embedding.clip={granularity: root_count, threshold: 0.25}",
]  # fmt: skip


def test_its_settings_reach_the_tables(tmp_path):
    with small_job(tmp_path, *OWN) as (_, job, *_):
        (tables,) = job.model.module.front.ebc.cowclip_tables()
        settings = tables.arrays[0].settings
        assert (type(settings.rule).__name__, settings.rule.betas) == ("Lion", (0.5, 0.75))
        clip = settings.clip
        assert (clip.name, clip.threshold, clip.columns) == ("RootCountClip", 0.25, 10)
        # The stored row of 12 columns has the first-order weight.
        assert [name for name in tables.arrays[0].states] == ["exp_avg"]
        assert tables.arrays[0].states["exp_avg"].dtype == torch.float32


@pytest.mark.parametrize(
    "override, words",
    [
        ("optim.embedding.eps=1", "eps: not for optimizer: lion, only for optimizer: adam"),
        ("optim.embedding.beta=1", "beta: unknown key with optimizer: lion; did you mean 'betas'?"),
        ("optim.embedding.betas=[0.9,2]", "optim.embedding.betas: found (0.9, 2.0); write"),
        ("optim.embedding.clip.ratio=1", "clip.ratio: not for granularity: root_count, only for"),
        ("optim.embedding.optimizer=lyon", "found 'lyon'", ),
    ],
)  # fmt: skip
def test_mistakes(override, words):
    with pytest.raises(SettingsError) as failure:
        load_config(ROOT / "configs/quickstart.yaml", [*OWN, override])
    assert words in str(failure.value)


def test_the_shipped_example_loads():
    config = load_config(ROOT / "examples/own_rule/lion.yaml")
    assert (config.optim.embedding.optimizer, config.model.name) == ("lion", "deepfm")
    assert config.optim.embedding.clip.threshold == 1e-3


@pytest.mark.slow
def test_a_run_trains_with_them_and_goes_on(tmp_path):
    overrides = [*OWN, "optim.embedding.lr=1e-3", "train.epochs=2"]
    run_small(tmp_path, overrides)
    losses = [line["loss"] for line in lines(tmp_path / "small") if line["kind"] == "train"]
    assert losses[-1] < losses[0]
    assert load_config_of_run(tmp_path / "small/config.yaml").optim.embedding.betas == (0.5, 0.75)
    run_small(
        tmp_path, [*OWN, "optim.embedding.lr=1e-3", "train.epochs=3", "checkpoint.resume=auto"]
    )
    assert max(line["epoch"] for line in lines(tmp_path / "small") if "epoch" in line) >= 2
