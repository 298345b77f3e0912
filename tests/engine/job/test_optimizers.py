"""The optimizers of tables and dense layers: settings, schedules, and which parameters decay."""

import json

import pytest

from stampede.engine.job.optimizers import table_optimizer
from stampede.optim import CowClip, Hyperparameters, Schedule, learning_rate
from support.checkpoints import small_job
from support.jobs import lines, run_small, small_config


@pytest.mark.slow
def test_both_schedules_are_followed_and_may_change_on_resume(tmp_path):
    overrides = ["train.log_every=1", "evaluate.select_on=test", "train.epochs=3"]
    run_small(tmp_path, [
        *overrides,
        "optim.embedding.schedule={warmup: 3, decay: step, unit: steps, every: 5, factor: 0.5}",
        "optim.dense.schedule={warmup: 0.5, decay: cosine, final: 0.1}",
    ])  # fmt: skip
    overrides[-1] = "train.epochs=4"
    run_small(tmp_path, [*overrides, "checkpoint.resume=auto",
                         "optim.dense.schedule={decay: step, warmup: 0, every: 3}"])  # fmt: skip
    logged = [line for line in lines(tmp_path / "small") if line["kind"] == "train"]
    # The scaling rule's factor for a quarter of the base batch is 1/2.
    for key, schedule, lr in (
        ("embedding_lr", Schedule(3, "step", "steps", every=5, factor=0.5), 1e-2),
        ("dense_lr", Schedule(0.5, "cosine", final=0.1), 1e-3 / 2),
    ):
        # 2000 rows in batches of 256: 7 whole ones and another step.
        expected = [learning_rate(schedule, lr, step, 2000 / 256, 24) for step in range(24)]
        assert [line[key] for line in logged[:24]] == pytest.approx(expected, rel=1e-12)
    assert [line["dense_lr"] for line in logged[24:]] == pytest.approx([1e-3 / 2 / 10] * 8)


@pytest.mark.parametrize("optimizer", ["adam", "rowwise_adagrad"])
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


def chosen(tmp_path, *overrides):
    scaled = Hyperparameters(embedding_lr=0.5, embedding_l2=0.25, dense_lr=0.1)
    return table_optimizer(small_config(tmp_path, *overrides), scaled, 10)


# Adam is that of other tests.
@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OURS[1:])
def test_every_optimizer_trains(tmp_path, optimizer):
    run_small(tmp_path, [f"optim.embedding.optimizer={optimizer}", "train.epochs=2"])
    losses = [line["loss"] for line in lines(tmp_path / "small") if line["kind"] == "train"]
    assert losses[-1] < losses[0]
    summary = json.loads((tmp_path / "small/summary.json").read_text())
    assert summary["clipped_share"] is not None


@pytest.mark.parametrize("optimizer", OURS)
def test_settings_reach_the_optimizer(tmp_path, optimizer):
    section = "rows: touched, weight_decay: 0.125, on_nonfinite: skip_row"
    section += ", lr: 1, clip: {granularity: row, threshold: 2.0}"
    kind, arguments = chosen(tmp_path, f"optim.embedding={{optimizer: {optimizer}, {section}}}")
    settings = kind.update_settings(kind.defaults_with(arguments))
    assert isinstance(settings.rule, kind.rule_type)
    assert (settings.rows, settings.weight_decay, settings.l2) == ("touched", 0.125, 0.25)
    assert settings.on_nonfinite == "skip_row"
    assert settings.clip == CowClip(granularity="row", threshold=2.0, columns=10)
    assert arguments["lr"] == 0.5


def test_no_clip_reaches_it(tmp_path):
    # Row-wise states tell the embedding from the first-order weight, also without a clip.
    _, arguments = chosen(tmp_path, "optim.embedding.clip=null")
    assert (arguments["clip"].granularity, arguments["clip"].columns) == ("none", 10)
