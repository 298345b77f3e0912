"""The optimizers of tables and dense layers: settings, schedules, and which parameters decay."""

import json

import pytest
import torch

from stampede.engine.optimizers import table_optimizer
from stampede.optim import CowClip, Hyperparameters, Schedule, learning_rate
from stampede.settings import SettingsError
from support.checkpoints import small_job
from support.jobs import lines, losses_and_weights, run_small, small_config

# 2000 rows in batches of 256: 7 whole ones and another step.
ROWS = ["train.log_every=1", "evaluate.select_on=test"]
PER_EPOCH = 2000 / 256
EMBEDDING_LR = 1e-2
# The scaling rule's factor for a quarter of the base batch is 1/2.
DENSE_LR = 1e-3 / 2


def rates(folder, key):
    return [line[key] for line in lines(folder / "small") if line["kind"] == "train"]


def test_both_schedules_are_followed(tmp_path):
    run_small(tmp_path, [
        *ROWS, "train.epochs=3",
        "optim.embedding.schedule={warmup: 3, decay: step, unit: steps, every: 5, factor: 0.5}",
        "optim.dense.schedule={warmup: 0.5, decay: cosine, final: 0.1}",
    ])  # fmt: skip
    for key, schedule, lr in (
        ("embedding_lr", Schedule(3, "step", "steps", every=5, factor=0.5), EMBEDDING_LR),
        ("dense_lr", Schedule(0.5, "cosine", final=0.1), DENSE_LR),
    ):
        expected = [learning_rate(schedule, lr, step, PER_EPOCH, 24) for step in range(24)]
        assert rates(tmp_path, key) == pytest.approx(expected, rel=1e-12)


def test_a_schedule_may_change_on_resume(tmp_path):
    run_small(tmp_path, ROWS)
    run_small(tmp_path, [*ROWS, "train.epochs=2", "checkpoint.resume=auto",
                         "optim.dense.schedule={decay: step, warmup: 0}"])  # fmt: skip
    assert rates(tmp_path, "dense_lr")[8:] == pytest.approx([DENSE_LR / 10] * 8)


@pytest.mark.parametrize("optimizer", ["adam", "fbgemm_rowwise_adagrad"])
def test_the_rate_reaches_the_tables(tmp_path, optimizer):
    with small_job(tmp_path, f"optim.embedding.optimizer={optimizer}") as (_, job, *_):
        (lookup,) = job.model.module.front.ebc._lookups
        for embedding, dense in ((0.25, 0.125), (0.0, 0.0)):
            job.set_learning_rates(embedding, dense)
            assert {group["lr"] for group in job.dense_optimizer.param_groups} == {dense}
            rates = {kernel.emb_module.get_learning_rate() for kernel in lookup._emb_modules}
            assert rates == {embedding}


def decays(folder, *overrides):
    """Weight decay and L2 of each dense parameter, by name."""
    with small_job(folder, "optim.dense.weight_decay=0.1", *overrides) as (_, job, *_):
        names = {id(parameter): name for name, parameter in job.dense_parameters.items()}
        return {
            names[id(parameter)]: (group["weight_decay"], group["l2"])
            for group in job.dense_optimizer.param_groups
            for parameter in group["params"]
        }


def test_matrices_of_the_network_decay(tmp_path):
    """Also dcn's kernels, but no bias and no norm, even one that is a matrix."""
    found = decays(tmp_path, "model.normalization=layer", "optim.scaling.rule=none")
    layer, norm = (
        "network.mlp.hidden._mlp.{}._linear",
        "network.mlp.hidden._mlp.{}._activation_fn.0",
    )
    assert found == {
        "bias": (0.0, 0.0),
        # As the first-order weights of ids.
        "number_weights.weight": (0.0, 1e-5),
        "network.mlp.output.weight": (0.1, 0.0),
        **{f"{layer.format(i)}.weight": (0.1, 0.0) for i in (0, 1)},
        **{f"{layer.format(i)}.bias": (0.0, 0.0) for i in (0, 1)},
        **{f"{norm.format(i)}.{name}": (0.0, 0.0) for i in (0, 1) for name in ("weight", "bias")},
    }
    found = decays(tmp_path, "model.name=dcn", "model.options={layers: 1}")
    assert found["network.cross.bias.0"] == (0.0, 0.0)
    assert found["network.cross.kernels.0"] == (0.1, 1e-5)
    found = decays(tmp_path, "model.name=masknet", "model.options={blocks: 1}")
    assert found["network.norm_weight"] == found["network.norm_bias"] == (0.0, 0.0)


OURS = ("adam", "rowwise_adam", "adagrad", "rowwise_adagrad", "sgd")
ON_CPU = (*OURS, "helen", "fbgemm_rowwise_adagrad", "fbgemm_cowclip")
SCALED = Hyperparameters(embedding_lr=0.5, embedding_l2=0.25, dense_lr=0.1)


def chosen(tmp_path, *overrides):
    config = small_config(tmp_path, *overrides)
    return table_optimizer(config, SCALED, 10, torch.device("cpu"))


@pytest.mark.slow
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
    assert isinstance(settings.rule, kind.rule_type)
    assert (settings.rows, settings.weight_decay, settings.l2) == ("touched", 0.125, 0.25)
    assert settings.on_nonfinite == "skip_row"
    assert settings.clip == CowClip(granularity="row", threshold=2.0, columns=10)
    assert arguments["lr"] == 0.5


def test_settings_of_helen_and_no_clip_reach_it(tmp_path):
    # Row-wise states tell the embedding from the first-order weight, also without a clip.
    _, arguments = chosen(tmp_path, "optim.embedding.clip=null")
    assert (arguments["clip"].granularity, arguments["clip"].columns) == ("none", 10)
    kind, arguments = chosen(tmp_path, "optim.embedding.optimizer=helen", "optim.embedding.rho=0.7")
    settings, lr = kind.table_settings(arguments)
    assert (settings.rho, settings.bound, settings.l2, settings.columns) == (0.7, 0.3, 0.25, 10)
    assert lr == 0.5


@pytest.mark.slow
def test_helen_differs_from_adam_by_its_first_pass(tmp_path):
    """Without a perturbation Helen is Adam with torch's epsilon and no clip."""
    plain = "{optimizer: adam, lr: 1e-2, clip: null, eps: 1e-8, eps_placement: torch}"
    adam, still, helen = (
        losses_and_weights(tmp_path, [f"optim.embedding={section}"]).losses
        for section in (
            plain, "{optimizer: helen, lr: 1e-2, rho: 0}", "{optimizer: helen, lr: 1e-2, rho: 1}"
        )
    )  # fmt: skip
    assert still == pytest.approx(adam, rel=1e-6)
    assert helen != pytest.approx(adam, rel=1e-6)


@pytest.mark.parametrize(
    "overrides, said",
    [
        (["optim.embedding.optimizer=adamw"], r"embedding\.optimizer: found 'adamw'.*'adam'"),
        (["optim.embedding.momentum=0.9"], "momentum: not for optimizer: adam, only for .*sgd"),
        (["optim.embedding.clip.granularity=row"], r"clip: granularity 'row' needs a threshold"),
        (["optim.embedding.ar_alpha=1"], "ar_alpha is 1 .*write rows: touched"),
        (
            ["optim.embedding.optimizer=fbgemm_cowclip", "sharding.plan=column_wise"],
            r"sharding\.plan.*'column_wise'.*table_wise",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused_with_the_configuration(tmp_path, overrides, said):
    with pytest.raises(SettingsError, match=said):
        small_config(tmp_path, *overrides)


def test_an_optimizer_that_the_device_lacks_is_refused(tmp_path):
    with pytest.raises(SettingsError, match=r"optim.embedding: .*fbgemm_adam"):
        run_small(tmp_path, ["optim.embedding.optimizer=fbgemm_adam"])
