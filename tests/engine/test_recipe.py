"""Settings that the recipe chooses."""

import pytest

from stampede.engine.config.load import load_config
from stampede.engine.recipe import open_keys, with_recipe
from stampede.engine.run import run
from stampede.settings import SettingsError
from support.jobs import SMALL, lines
from support.paths import ROOT

CRITEO = ROOT / "configs/criteo_kaggle.yaml"
AUTO = [key for key in SMALL if not key.startswith(("preset", "train.epochs", "train.batch_size"))]


def chosen(rows, *overrides, world_size=1):
    config, choices = with_recipe(load_config(CRITEO, overrides), rows, 39, world_size)
    assert not open_keys(config)
    return config, {choice.key: choice.value for choice in choices}


def test_every_key_that_is_left_open_is_chosen_and_told():
    config, choices = chosen(105_793)
    assert set(choices) == open_keys(load_config(CRITEO))
    assert config.train.batch_size == 1024 and config.train.epochs == 6
    assert config.optim.embedding.l2 == pytest.approx(4 * 39 / 105_793)
    assert config.optim.embedding.schedule.decay == "polynomial"


def test_what_is_given_stays():
    given = ["optim.embedding.lr=0.5", "train.epochs=3", "optim.dense.schedule.decay=cosine"]
    config, choices = chosen(105_793, *given)
    assert config.optim.embedding.lr == 0.5 and config.train.epochs == 3
    assert config.optim.dense.schedule.decay == "cosine"
    assert not {"optim.embedding.lr", "train.epochs", "optim.dense.schedule.decay"} & set(choices)


def test_without_a_scaling_rule_no_base_batch_size_is_told():
    config, choices = chosen(105_793, "optim.scaling.rule=none")
    assert config.optim.scaling.base_batch_size
    assert "train.batch_size" in choices and "optim.scaling.base_batch_size" not in choices


def test_the_paper_leaves_nothing_open():
    config = load_config(CRITEO, ["preset=paper"])
    assert not open_keys(config)
    assert with_recipe(config, 1000, 39, 1) == (config, [])
    assert config.optim.embedding.lr == 1e-4 and config.optim.dense.schedule.warmup == 1.0
    assert config.data.features == "paper" and config.train.epochs == 10
    avazu = load_config(ROOT / "configs/avazu.yaml", ["preset=paper"])
    assert avazu.optim.dense.lr == 1e-4 and avazu.optim.embedding.clip.bound == 1e-4
    helen = load_config(CRITEO, ["preset=paper", "optim.embedding.optimizer=helen"])
    assert helen.optim.embedding.lr == 1e-4
    with pytest.raises(SettingsError, match=r"preset: found 'papers'; write .*'paper'"):
        load_config(CRITEO, ["preset=papers"])


@pytest.mark.parametrize(
    "rows, batch, base, epochs",
    [
        (3_240, 32, 32, 6),
        (21_158, 128, 128, 6),
        (600_000, 1024, 1024, 6),
        (2_500_000, 4096, 1024, 3),
        (41_000_000, 8192, 1024, 2),
    ],
)
def test_batch_and_epochs_by_rows(rows, batch, base, epochs):
    config, _ = chosen(rows)
    found = config.train.batch_size, config.optim.scaling.base_batch_size, config.train.epochs
    assert found == (batch, base, epochs)


def test_settings_that_the_network_does_not_use_are_left_alone():
    for name, scale, dropout in (
        ("deepfm", 4.0, 0.2),
        ("lr", 4.0, 0.0),
        ("dlrm", 1.0, 0.2),
        ("autoint", 1.0, 0.0),
    ):
        config, _ = chosen(105_793, f"model.name={name}")
        assert (config.model.first_order_scale, config.model.dropout) == (scale, dropout)


# The rates are a multiple of the dense rate of six epochs at batch 1024.
@pytest.mark.parametrize(
    "batch, epochs, betas, warmup, tables, dense",
    [
        (2048, 24, (0.8, 0.992), (1.0, 1.0), 2.0, 0.5),
        (8192, 24, (0.7, 0.968), (1.0, 1.0), 2.0, 0.5),
        (32768, 48, (0.5, 0.87), (2.0, 2.0), 2.0, 0.5),
        (65536, 68, (0.4, 0.74), (2.83, 2.83), 2.0, 0.5),
    ],
)
def test_large_batches_of_a_small_log(batch, epochs, betas, warmup, tables, dense):
    config, _ = chosen(105_793, f"train.batch_size={batch}")
    optim = config.optim
    assert config.train.epochs == epochs
    assert optim.embedding.betas == optim.dense.betas == betas
    assert (optim.embedding.schedule.warmup, optim.dense.schedule.warmup) == warmup
    rate = 1e-3 * (600 / (6 * 105_793 / 1024)) ** 0.5
    assert optim.embedding.lr == pytest.approx(tables * rate, rel=2e-3)
    assert optim.dense.lr == pytest.approx(dense * rate, rel=2e-3)
    # Given epochs change no rate.
    short, _ = chosen(105_793, f"train.batch_size={batch}", "train.epochs=8")
    assert short.optim.dense.lr == optim.dense.lr


def test_given_settings_of_a_large_batch_stay():
    given = ["train.batch_size=8192", "optim.dense.betas=[0.9,0.99]", "optim.embedding.lr=3e-3"]
    optim = chosen(105_793, *given, "optim.embedding.schedule.warmup=0")[0].optim
    assert optim.dense.betas == (0.9, 0.99) and optim.embedding.betas == (0.7, 0.968)
    assert optim.embedding.lr == 3e-3 and optim.embedding.schedule.warmup == 0


def test_a_large_log_has_no_large_batches():
    large = chosen(10_000_000, "train.batch_size=1048576")[0]
    usual = chosen(10_000_000)[0]
    assert large.optim == usual.optim and large.train.epochs == usual.train.epochs == 2


def test_periods_and_rounding_for_the_ranks_make_no_large_batch():
    rounded = ["train.batch_size=1025", "evaluate.batch_size=8190"]
    config, _ = chosen(105_793, *rounded, world_size=5)
    assert config.optim.dense.betas == (0.9, 0.999)
    periods = ["data.split=periods", "train.batch_size=32768"]
    config, _ = chosen(105_793, *periods)
    assert config.optim.dense.betas == (0.9, 0.999) and config.train.epochs == 1
    config, _ = chosen(1_000_000, "data.split=periods")
    assert config.optim.embedding.lr == config.optim.dense.lr < 1e-3


def test_warmups_in_steps_and_in_short_trainings():
    unit = ["optim.embedding.schedule.unit=steps", "optim.dense.schedule.unit=steps"]
    config, _ = chosen(102_400, *unit)
    schedules = config.optim.embedding.schedule, config.optim.dense.schedule
    assert [schedule.warmup for schedule in schedules] == [0, 20]
    config, _ = chosen(102_400, "train.batch_size=8192", unit[0])
    assert config.optim.embedding.schedule.warmup == 12
    # A quarter of a short training.
    config, _ = chosen(102_400, "train.batch_size=8192", "train.epochs=1")
    assert config.optim.dense.schedule.warmup == 0.25
    # The paper's epoch.
    config, _ = chosen(102_400, "preset=paper", "train.batch_size=1024", unit[1])
    assert config.optim.dense.schedule.warmup == 100
    # The given one stays.
    config, _ = chosen(102_400, *unit, "optim.dense.schedule.warmup=7")
    assert config.optim.dense.schedule.warmup == 7


def test_patience_grows_with_the_epochs():
    assert chosen(105_793)[0].evaluate.patience == 2
    assert chosen(105_793, "train.batch_size=32768")[0].evaluate.patience == 16
    every_second = ["train.batch_size=32768", "evaluate.every_epochs=2"]
    assert chosen(105_793, *every_second)[0].evaluate.patience == 8
    assert chosen(105_793, "train.epochs=40", "evaluate.patience=0")[0].evaluate.patience == 0


def test_the_dense_rate_falls_with_the_steps_and_the_tables_rate_does_not():
    optim = [chosen(rows)[0].optim for rows in (1_000, 1_000_000, 10**9)]
    rates = [one.dense.lr for one in optim]
    assert rates[0] == 1e-3 > rates[1] > rates[2] == 1e-4
    assert [one.embedding.lr for one in optim] == [1e-3] * 3


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_the_batch_divides_by_the_ranks(world_size):
    config = load_config(CRITEO, ["evaluate.batch_size=84"], world_size)
    settled, _ = with_recipe(config, 105_793, 39, world_size)
    assert settled.train.batch_size % world_size == 0
    with pytest.raises(SettingsError, match=r"train\.batch_size: 1000 is global"):
        with_recipe(load_config(CRITEO, ["train.batch_size=1000"]), 105_793, 39, 3)


@pytest.mark.slow
def test_a_run_goes_on_with_what_it_began_with(tmp_path):
    """A recipe of a later version, or another number of ranks, would choose otherwise."""
    small = tmp_path / "small.yaml"
    small.write_text("")
    overrides = [f"run.dir={tmp_path}", *AUTO]
    run(load_config(small, [*overrides, "train.epochs=2", "run.name=whole"]))
    run(load_config(small, [*overrides, "train.epochs=1"]))
    saved = load_config(tmp_path / "small/config.yaml")
    assert not open_keys(saved) and saved.train.batch_size == 16
    goes_on = ["train.epochs=2", "checkpoint.resume=auto"]
    run(load_config(small, [*overrides, *goes_on, "optim.embedding.schedule.decay=constant"]))
    again = load_config(tmp_path / "small/config.yaml")
    assert again.optim.embedding.l2 == saved.optim.embedding.l2
    assert again.train.batch_size == saved.train.batch_size
    assert lines(tmp_path / "small")[-1]["step"] == lines(tmp_path / "whole")[-1]["step"]
