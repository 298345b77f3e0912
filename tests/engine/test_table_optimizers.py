"""Every optimizer of the tables, as a user asks for it in the configuration."""

import json

import pytest

from stampede.engine.optimizers import table_optimizer
from stampede.optim import Hyperparameters
from stampede.settings import SettingsError
from support.jobs import lines, losses_and_weights, run_small, small_config

pytestmark = pytest.mark.slow

OURS = ("adam", "rowwise_adam", "adagrad", "rowwise_adagrad", "sgd")
ON_CPU = (*OURS, "helen", "fbgemm_rowwise_adagrad", "fbgemm_cowclip")
SCALED = Hyperparameters(embedding_lr=0.5, embedding_l2=0.25, dense_lr=0.1)


def chosen(tmp_path, *overrides):
    import torch

    config = small_config(tmp_path, *overrides)
    return table_optimizer(config, SCALED, 10, torch.device("cpu"))


@pytest.mark.parametrize("optimizer", ON_CPU)
def test_every_optimizer_trains(tmp_path, optimizer):
    run_small(tmp_path, [f"optim.embedding.optimizer={optimizer}", "train.epochs=2"])
    losses = [line["loss"] for line in lines(tmp_path / "small") if line["kind"] == "train"]
    assert losses[-1] < losses[0]
    summary = json.loads((tmp_path / "small/summary.json").read_text())
    assert (summary["clipped_share"] is None) == optimizer.startswith("fbgemm")


@pytest.mark.parametrize("optimizer", OURS)
def test_settings_reach_the_optimizer(tmp_path, optimizer):
    kind, arguments = chosen(
        tmp_path,
        f"optim.embedding.optimizer={optimizer}",
        "optim.embedding.rows=touched",
        "optim.embedding.weight_decay=0.125",
        "optim.embedding.on_nonfinite=skip_row",
        "optim.embedding.clip.granularity=row",
        "optim.embedding.clip.threshold=2.0",
    )
    settings = kind.update_settings(kind.defaults_with(arguments))
    assert settings.rule == kind.rule_type(
        **{k: arguments[k] for k in kind.rule_type.__dataclass_fields__ if k in arguments}
    )
    assert (settings.rows, settings.weight_decay, settings.l2) == ("touched", 0.125, 0.25)
    assert settings.on_nonfinite == "skip_row"
    assert (settings.clip.granularity, settings.clip.threshold) == ("row", 2.0)
    assert settings.clip.columns == 10
    assert arguments["lr"] == 0.5


def test_settings_of_helen_and_no_clip_reach_it(tmp_path):
    # Row-wise states tell the embedding from the first-order weight, also without a clip.
    _, arguments = chosen(tmp_path, "optim.embedding.clip=null")
    assert (arguments["clip"].granularity, arguments["clip"].columns) == ("none", 10)
    kind, arguments = chosen(tmp_path, "optim.embedding.optimizer=helen", "optim.embedding.rho=0.7")
    settings, lr = kind.table_settings(arguments)
    assert (settings.rho, settings.bound, settings.l2, settings.columns) == (0.7, 0.3, 0.25, 10)
    assert lr == 0.5


def test_helen_differs_from_adam_by_its_first_pass(tmp_path):
    """Without a perturbation Helen is Adam with torch's epsilon and no clip."""
    plain = [
        "optim.embedding.optimizer=adam",
        "optim.embedding.clip=null",
        "optim.embedding.eps=1e-8",
        "optim.embedding.eps_placement=torch",
    ]
    results = {}
    for name, overrides in {
        "adam": plain,
        "still": ["optim.embedding.optimizer=helen", "optim.embedding.rho=0"],
        "helen": ["optim.embedding.optimizer=helen", "optim.embedding.rho=1"],
    }.items():
        results[name] = losses_and_weights(tmp_path, overrides)[0]
    assert results["still"] == pytest.approx(results["adam"], rel=1e-6)
    assert results["helen"] != pytest.approx(results["adam"], rel=1e-6)


@pytest.mark.parametrize(
    "overrides, words",
    [
        (["optim.embedding.optimizer=adamw"], ["optim.embedding.optimizer", "'adamw'", "'adam'"]),
        (["optim.embedding.momentum=0.9"], ["momentum: not for optimizer: adam"]),
        (
            ["optim.embedding.optimizer=sgd", "optim.embedding.betas=[0.9,0.99]"],
            ["not for optimizer: sgd", "only for optimizer: "],
        ),
        (
            ["optim.embedding.clip.granularity=row"],
            ["optim.embedding.clip: granularity 'row' needs a threshold"],
        ),
        (["optim.embedding.clip.threshold=1.0"], ["'cowclip' has no threshold, but it is 1.0"]),
        (["optim.embedding.ar_alpha=1"], ["ar_alpha is 1", "write rows: touched"]),
        (
            ["optim.embedding.optimizer=fbgemm_cowclip", "sharding.plan=column_wise"],
            ["sharding.plan", "'column_wise'", "table_wise"],
        ),
        (["optim.embedding.on_nonfinite=ignore"], ["'error' or 'skip_row'"]),
        (["optim.embedding.weight_decay=-1"], ["weight_decay: found -1"]),
    ],
)
def test_what_does_not_fit_is_refused_when_the_configuration_is_read(tmp_path, overrides, words):
    with pytest.raises(SettingsError) as failure:
        small_config(tmp_path, *overrides)
    for word in words:
        assert word in str(failure.value)


def test_what_the_device_lacks_is_refused_before_training(tmp_path):
    with pytest.raises(SettingsError, match=r"optim.embedding: .*fbgemm_adam"):
        run_small(tmp_path, ["optim.embedding.optimizer=fbgemm_adam"])
