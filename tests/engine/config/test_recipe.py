"""Settings that the recipe chooses."""

import pytest

from stampede.engine.config.load import load_config
from stampede.engine.config.recipe import open_keys, with_recipe
from stampede.engine.run import run
from stampede.settings import SettingsError
from support.jobs import SMALL
from support.paths import ROOT

CRITEO = ROOT / "configs/criteo_kaggle.yaml"
AUTO = [key for key in SMALL if not key.startswith(("preset", "train.epochs", "train.batch_size"))]
# Of the small log that most tests are about.
ROWS = 105_793


def chosen(rows, *overrides, world_size=1, strength=None):
    given = load_config(CRITEO, overrides)
    config, choices = with_recipe(given, rows, 39, world_size, strength=strength)
    assert not open_keys(config)
    return config, {choice.key: choice.value for choice in choices}


def test_every_key_that_is_left_open_is_chosen_and_told():
    config, choices = chosen(ROWS)
    assert set(choices) == open_keys(load_config(CRITEO))
    assert config.optim.embedding.l2 == pytest.approx(4 * 39 / ROWS)
    _, choices = chosen(ROWS, "optim.scaling.rule=none")
    assert "train.batch_size" in choices and "optim.scaling.base_batch_size" not in choices


def test_what_is_given_stays():
    given = ["train.batch_size=8192", "optim.dense.betas=[0.9,0.99]", "optim.embedding.lr=3e-3",
             "optim.embedding.schedule.warmup=0", "train.epochs=3"]  # fmt: skip
    config, choices = chosen(ROWS, *given)
    optim = config.optim
    assert optim.dense.betas == (0.9, 0.99) and optim.embedding.betas == (0.7, 0.968)
    assert optim.embedding.lr == 3e-3 and optim.embedding.schedule.warmup == 0
    assert config.train.batch_size == 8192 and config.train.epochs == 3
    assert not {key.partition("=")[0] for key in given} & set(choices)


def test_the_paper_leaves_nothing_open():
    config = load_config(CRITEO, ["preset=paper"])
    assert not open_keys(config)
    assert with_recipe(config, 1000, 39, 1) == (config, [])
    assert config.optim.embedding.lr == 1e-4 and config.optim.dense.schedule.warmup == 1.0
    assert config.data.features == "paper" and config.train.epochs == 10
    avazu = load_config(ROOT / "configs/avazu.yaml", ["preset=paper"])
    assert avazu.optim.dense.lr == 1e-4 and avazu.optim.embedding.clip.bound == 1e-4
    with pytest.raises(SettingsError, match=r"preset: found 'papers'; write .*'paper'"):
        load_config(CRITEO, ["preset=papers"])


BATCH, EPOCHS, PATIENCE = "train.batch_size", "train.epochs", "evaluate.patience"
BASE, BETAS = "optim.scaling.base_batch_size", "optim.dense.betas"
SCALE, DROPOUT, WARMUP = "model.first_order_scale", "model.dropout", "optim.dense.schedule.warmup"
AVERAGING, DECAY = "train.averaging", "optim.embedding.schedule.decay"
CONTINUED = ("data.split=periods", "train.replay=0")
IN_STEPS = "optim.dense.schedule.unit=steps"


@pytest.mark.parametrize(
    "rows, given, expected",
    [
        (3_240, [], {BATCH: 32, BASE: 32, EPOCHS: 20, AVERAGING: 8, DECAY: "constant"}),
        (ROWS, [], {BATCH: 1024, BASE: 1024, EPOCHS: 20, PATIENCE: 3, AVERAGING: 8}),
        (ROWS, [f"{EPOCHS}=7"], {PATIENCE: 3, AVERAGING: 8, DECAY: "constant"}),
        # Rates that fall and weights that are not averaged end after the usual epochs.
        (ROWS, ["optim.dense.schedule.decay=cosine"], {EPOCHS: 6, PATIENCE: 2, AVERAGING: 0}),
        (ROWS, [f"{AVERAGING}=0"], {EPOCHS: 6, PATIENCE: 2, DECAY: "polynomial"}),
        # Few given epochs end with rates of 0.
        (ROWS, [f"{EPOCHS}=6"], {PATIENCE: 2, AVERAGING: 0, DECAY: "polynomial"}),
        (2_500_000, [], {BATCH: 4096, BASE: 1024, EPOCHS: 3, PATIENCE: 2, AVERAGING: 0}),
        (41_000_000, [], {BATCH: 8192, BASE: 1024, EPOCHS: 2}),
        # Large batches of a small log.
        (ROWS, [f"{BATCH}=2048"], {EPOCHS: 24, BETAS: [0.7, 0.968], WARMUP: 1.0}),
        (ROWS, [f"{BATCH}=32768"], {EPOCHS: 48, BETAS: [0.5, 0.87], WARMUP: 2.0, PATIENCE: 16}),
        (ROWS, [f"{BATCH}=65536"], {EPOCHS: 68, BETAS: [0.4, 0.74], WARMUP: 2.83}),
        (ROWS, [f"{BATCH}=32768", "evaluate.every_epochs=2"], {PATIENCE: 8}),
        # Of a large log only few steps matter, and periods have none.
        (10_000_000, [f"{BATCH}=131072"], {EPOCHS: 2, BETAS: [0.7, 0.98]}),
        (41_000_000, [f"{BATCH}=131072"], {EPOCHS: 2, BETAS: [0.8, 0.995]}),
        (41_000_000, [f"{BATCH}=32768"], {EPOCHS: 2, BETAS: [0.9, 0.999]}),
        (ROWS, [f"{BATCH}=32768", *CONTINUED], {EPOCHS: 1, BETAS: [0.9, 0.999], AVERAGING: 0}),
        # A new model of all files so far, and of some of a large log.
        (ROWS, ["data.split=periods"], {EPOCHS: 5, AVERAGING: 8, DECAY: "constant"}),
        (2_500_000, ["data.split=periods"], {EPOCHS: 1, AVERAGING: 0}),
        (2_500_000, ["data.split=periods", "train.replay=5"], {EPOCHS: 3, AVERAGING: 8}),
        (102_400, [IN_STEPS], {WARMUP: 20}),
        # A quarter of a short training.
        (102_400, [f"{BATCH}=8192", f"{EPOCHS}=1"], {WARMUP: 0.25}),
        # The paper's epoch.
        (102_400, [IN_STEPS, "preset=paper", f"{BATCH}=1024"], {WARMUP: 100}),
        # What the network does not use is left alone.
        (ROWS, ["model.name=deepfm"], {SCALE: 4.0, DROPOUT: 0.2}),
        (ROWS, ["model.name=lr"], {SCALE: 4.0, DROPOUT: 0.0}),
        (ROWS, ["model.name=dlrm"], {SCALE: 1.0, DROPOUT: 0.2}),
        (ROWS, ["model.name=autoint"], {SCALE: 1.0, DROPOUT: 0.0}),
    ],
)
def test_what_is_chosen(rows, given, expected):
    _, choices = chosen(rows, *given)
    assert {key: choices[key] for key in expected} == expected


def test_logistic_regression_ends_in_the_minimum_that_validation_chose():
    config, choices = chosen(ROWS, "model.name=lr", strength=0.3)
    # The penalty w**2 / (2 C rows) of w = 4 * stored.
    assert config.optim.embedding.l2 == pytest.approx(16 / (2 * 0.3 * ROWS))
    assert choices[DECAY] == "polynomial" and choices["train.averaging"] == 0
    assert choices["evaluate.every_epochs"] == choices[EPOCHS] == 20
    config, choices = chosen(ROWS, "model.name=lr", "model.first_order_scale=2", strength=1)
    assert config.optim.embedding.l2 == pytest.approx(4 / (2 * ROWS))
    # Without a known C.
    config, choices = chosen(ROWS, "model.name=lr")
    assert config.optim.embedding.l2 == pytest.approx(4 * 39 / ROWS)
    assert choices["evaluate.every_epochs"] == 1 and choices[DECAY] == "polynomial"


def test_a_run_keeps_the_metric_of_a_checkpoint_that_does_not_name_it():
    saved, _ = chosen(ROWS)
    saved = saved.model_dump(mode="json")
    assert saved["evaluate"].pop("metric") == "both"
    del saved["train"]["averaging"]
    config, _ = with_recipe(load_config(CRITEO), ROWS, 39, 1, saved)
    assert config.evaluate.metric == "auc" and config.train.averaging == 0


def test_rates():
    """Of the tables it is the same, except on small logs and with large batches or periods."""
    optim = [chosen(rows)[0].optim for rows in (1_000, 1_000_000, 10**9)]
    rates = [one.dense.lr for one in optim]
    assert 1e-3 > rates[0] > rates[1] == rates[2] == 5e-4
    assert [one.embedding.lr for one in optim] == [2e-3, 1e-3, 1e-3]
    periods = chosen(1_000_000, "data.split=periods")[0].optim
    assert periods.embedding.lr == periods.dense.lr < 1e-3
    # Given epochs change no rate of a large batch.
    usual = 1e-3 * (600 / (6 * ROWS / 1024)) ** 0.5
    for epochs in ("null", 8):
        large = chosen(ROWS, "train.batch_size=8192", f"train.epochs={epochs}")[0].optim
        assert large.embedding.lr == pytest.approx(2 * usual, rel=2e-3)
        assert large.dense.lr == pytest.approx(usual / 2, rel=2e-3)


def test_factors_of_what_is_chosen():
    usual, _ = chosen(ROWS)
    factors = ["recipe.table_lr=2", "recipe.dense_lr=0.5", "recipe.l2=0.1"]
    config, choices = chosen(ROWS, *factors)
    of_usual = usual.optim.embedding.lr, usual.optim.dense.lr, usual.optim.embedding.l2
    optim = config.optim
    found = optim.embedding.lr, optim.dense.lr, optim.embedding.l2
    assert found == pytest.approx([f * v for f, v in zip((2, 0.5, 0.1), of_usual, strict=True)])
    assert choices["optim.embedding.l2"] == optim.embedding.l2
    # Of more rows, by the rule for these.
    assert chosen(2 * ROWS, *factors)[0].optim.embedding.l2 == pytest.approx(found[2] / 2)
    assert chosen(ROWS, *factors, "optim.embedding.l2=3e-5")[0].optim.embedding.l2 == 3e-5
    epochs = [chosen(rows, "recipe.epochs=0.5")[0].train.epochs for rows in (2_500_000, 10**8)]
    assert epochs == [2, 1]
    with pytest.raises(SettingsError, match=r"preset is paper.*write preset: auto"):
        load_config(CRITEO, ["preset=paper", "recipe.l2=0.5"])


def test_a_short_training_has_less_l2_and_faster_dense_layers():
    for rows, given in ((2_500_000, []), (10**8, []), (ROWS, ["train.epochs=2"])):
        optim = chosen(rows, *given)[0].optim
        assert optim.embedding.l2 == pytest.approx(39 / rows) and optim.dense.lr >= 5e-4
    longer = ["train.epochs=6"], ["model.name=lr"], ["train.batch_size=131072"]
    for given in (*longer, ["data.split=periods"]):
        optim = chosen(2_500_000, *given)[0].optim
        assert optim.embedding.l2 == pytest.approx(4 * 39 / 2_500_000) and optim.dense.lr < 5e-4


def test_the_batch_divides_by_the_ranks():
    for world_size in (2, 3, 7):
        config, _ = chosen(ROWS, "evaluate.batch_size=84", world_size=world_size)
        assert config.train.batch_size % world_size == 0
    # A batch that was rounded up for the ranks is no large one.
    config, _ = chosen(ROWS, "train.batch_size=1025", "evaluate.batch_size=8190", world_size=5)
    assert config.optim.dense.betas == (0.9, 0.999)
    with pytest.raises(SettingsError, match=r"train\.batch_size: 1000 is global"):
        chosen(ROWS, "train.batch_size=1000", world_size=3)


@pytest.mark.wide
def test_a_run_goes_on_with_what_it_began_with(tmp_path):
    """A recipe of a later version, or another number of ranks, would choose otherwise."""
    small = tmp_path / "small.yaml"
    small.write_text("")
    overrides = [f"run.dir={tmp_path}", *AUTO]
    run(load_config(small, [*overrides, "train.epochs=1"]))
    saved = load_config(tmp_path / "small/config.yaml")
    assert not open_keys(saved) and saved.train.batch_size == 16
    goes_on = ["train.epochs=2", "checkpoint.resume=auto"]
    run(load_config(small, [*overrides, *goes_on, "optim.embedding.schedule.decay=constant"]))
    again = load_config(tmp_path / "small/config.yaml")
    assert again.optim.embedding.l2 == saved.optim.embedding.l2
    assert again.train.batch_size == saved.train.batch_size
