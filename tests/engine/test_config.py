"""What a wrong configuration gets: the key, what was found, what to write."""

import subprocess
import sys
from typing import get_args

import pytest
import yaml

from stampede.engine.config import Config, config_type, optim, to_yaml
from stampede.engine.config.load import load_config
from stampede.optim import baselines, rules
from stampede.optim import settings as of_tables
from stampede.optim.sharded import supported
from stampede.settings import SettingsError, all_keys
from support.paths import ROOT
from support.waiting import HANG

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))

# The YAML, and words of the sentence it gets.
BAD = [
    ("trian:\n  epochs: 3", ["trian: unknown key; did you mean 'train'?"]),
    ("train:\n  epoch: 3", ["train.epoch: unknown key; did you mean 'epochs'?"]),
    ("train:\n  xyz: 3", ["train.xyz: unknown key; allowed here: ", "batch_size, "]),
    ("batch_size: 3", ["batch_size: unknown key", "'train.batch_size'"]),
    ("data:\n  kind: criteo_kaggle\n  splt: random", ["data.splt", "did you mean 'split'?"]),
    ("optim:\n  embedding:\n    clip:\n      rato: 1", ["optim.embedding.clip.rato", "'ratio'"]),
    ("train:\n  epochs: many", ["train.epochs: found 'many'", "a whole number"]),
    ("train:\n  batch_size: 1.5", ["train.batch_size: found 1.5", "a whole number"]),
    ("train:\n  epochs: 0", ["train.epochs: found 0", "greater than or equal to 1"]),
    ("run:\n  overwrite: 1", ["run.overwrite: found 1", "true or false"]),
    ("model:\n  hidden: 400", ["model.hidden: found 400", "a list"]),
    ("optim:\n  embedding:\n    lr: -1", ["optim.embedding.lr: found -1", "greater than"]),
    ("optim:\n  embedding:\n    lr: .inf", ["optim.embedding.lr: found inf", "finite"]),
    ("sharding:\n  plan: rowwise", ["sharding.plan: found 'rowwise'", "did you mean 'row_wise'?"]),
    ("data:\n  kind: criteo", ["data.kind: found 'criteo'", "'synthetic', 'criteo_kaggle'"]),
    (
        "model:\n  name: dcnv2\n  options: {expert: 2}",
        ["model.options.expert: unknown key with name: dcnv2", "'experts'"],
    ),
    ("model:\n  name: dcn\n  options: 3", ["model.options: found 3", "a section with keys"]),
    ("model:\n  name: masknet\n  options: {structure: serail}", ["did you mean 'serial'?"]),
    ("data:\n  validation_fraction: 0", ["evaluate.select_on", "data.validation_fraction"]),
    ("optim:\n  dense:\n    betas: [0.9, 1.0]", ["optim.dense.betas", "less than 1"]),
    ("optim:\n  dense:\n    schedule: {decay: linear}", ["optim.dense.schedule.decay", "'step'"]),
    (
        "optim:\n  embedding:\n    schedule: {decay: cosine, every: 2}",
        ["optim.embedding.schedule: every is 2.0", "'cosine' does not use", "decay 'step'"],
    ),
    (
        "optim:\n  dense:\n    schedule: {decay: cosine, warmup: 1}\ntrain:\n  epochs: 1",
        ["optim.dense.schedule.decay is 'cosine'", "train.epochs 1", "below 1"],
    ),
    (
        "data:\n  kind: prepared\n  rows: 3\n  split: random\n  cache: x",
        [
            "  data.rows: not for kind: prepared, only for kind: synthetic; leave it out",
            "  data.cache: not for kind: prepared, only for kind: criteo_kaggle, criteo_1tb, avazu",
        ],
    ),
    ("run:\n  overwrite: true\ncheckpoint:\n  resume: auto", ["only one of them"]),
    ("train: 3", ["train: found 3", "a section with keys"]),
    ("a: [", ["line 1", "not valid YAML"]),
    ("run:\n  name: ../x", ["run.name: found '../x'"]),
    (
        "train:\n  batch_size: 8193",
        ["train.batch_size: 8193", "number of ranks, 2", "8192 or 8194"],
    ),
    ("evaluate:\n  batch_size: 3", ["evaluate.batch_size: 3", "number of ranks, 2"]),
    ("train: {reproducible: true, tiles: 1}", ["train.tiles: 1", "number of ranks, 2"]),
    ("train: {tiles: 12}", ["train.tiles: 12 is not a power of two"]),
    (
        "train: {reproducible: true}\nsharding: {plan: column_wise}",
        ["sharding.plan", "'column_wise'", "write auto or table_wise or row_wise"],
    ),
    *(
        (f"train: {{reproducible: true}}\n{section}: {values}", [key, "train.reproducible forbids"])
        for section, values, key in (
            ("sharding", "{communication: {forward: bf16}}", "sharding.communication.forward"),
            ("sharding", "{communication: {backward: bf16}}", "sharding.communication.backward"),
            ("optim", "{embedding: {optimizer: helen}}", "optim.embedding.optimizer: with 'helen'"),
            ("optim", "{embedding: {optimizer: fbgemm_cowclip}}", "with 'fbgemm_cowclip'"),
            ("optim", "{embedding: {clip: {granularity: global, threshold: 1}}}", "with 'global'"),
        )
    ),
    ("train: {reproducible: true, compile: default}", ["train.compile: with 'default'"]),
]


@pytest.mark.parametrize("text, words", BAD)
def test_bad_yaml(tmp_path, text, words):
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError) as failure:
        load_config(path, world_size=2)
    for word in [str(path) if "run:\n  name" not in text else "", *words]:
        assert word in str(failure.value)


@pytest.mark.parametrize("override", ["epochs=3", "train.epochs", "train.=3", "=3"])
def test_bad_overrides(override):
    with pytest.raises(SettingsError, match=r"section\.key=value"):
        load_config(CONFIGS[0], [override])


def test_absent_files(tmp_path):
    with pytest.raises(SettingsError, match=r"no such file.*--help"):
        load_config(tmp_path / "absent.yaml")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_shipped_configurations_load_and_read_back(path, tmp_path):
    config = load_config(path, ["optim.dense.lr=1e-4"], world_size=2)
    assert config.run.name == path.stem and config.optim.dense.lr == 1e-4
    assert path.read_text().startswith("# ")
    printed = tmp_path / "printed.yaml"
    printed.write_text(to_yaml(config))
    assert load_config(printed) == config
    assert set(yaml.safe_load(printed.read_text())) == set(Config.model_fields)


def test_the_help_names_the_options_of_networks():
    keys = {(key.path, key.kinds): key for key in all_keys(config_type())}
    assert keys["model.options.rank", "model.name: dcnv2"].default == 32
    assert keys["model.options.layers", "model.name: dcn, dcnv2"].default == 3
    name = keys["model.name", ""]
    assert name.default == "deepfm"
    assert name.description.startswith("network; one of deepfm, autoint, dcn,")


def test_every_field_is_described():
    assert len(all_keys(config_type())) > 40
    for key in all_keys(config_type()):
        assert key.description, key.path


def test_its_choices_are_the_optimizers_own():
    assert get_args(optim.EpsPlacement) == get_args(rules.EpsPlacement)
    assert get_args(optim.Rows) == get_args(of_tables.Rows)
    assert get_args(optim.OnNonfinite) == get_args(of_tables.OnNonfinite)
    assert optim.BASELINES == baselines.BASELINES
    assert optim.BASELINE_SHARDING_TYPES == baselines.BASELINE_SHARDING_TYPES
    assert optim.SHARDING_TYPES == supported.SHARDING_TYPES


PRINTS = """
import sys
from stampede.engine import cli
try:
    cli.main(sys.argv[1:])
except SystemExit:
    pass
print(*sys.modules, file=sys.stderr)
"""


@pytest.mark.parametrize("option", ["--help", "--print-config"])
def test_printing_it_imports_neither_torch_nor_matplotlib(option):
    done = subprocess.run(
        [sys.executable, "-c", PRINTS, "configs/criteo_kaggle.yaml", "data.path=x", option],
        capture_output=True, text=True, cwd=ROOT, timeout=HANG, check=True,
    )  # fmt: skip
    imported = set(done.stderr.split())
    assert "stampede.engine.config" in imported and "optim" in done.stdout
    assert not imported & {"torch", "polars", "pandas", "matplotlib", "tensorboard"}


@pytest.mark.parametrize(
    "wrong, named",
    [
        (["train.epochs=0"], "train.epochs=0"),
        (["model.hidden=[0]"], "model.hidden=[0]"),
        (["optim.embedding.clip={granularity: rowx}"], "optim.embedding.clip={granularity: rowx}"),
        (["data.path=x", "data.schema_file=y"], "data.path=x data.schema_file=y"),
        (["train.epoch=3"], "train.epoch=3"),
    ],
)
def test_a_mistake_names_the_override_that_made_it(wrong, named):
    quickstart = next(path for path in CONFIGS if path.stem == "quickstart")
    with pytest.raises(SettingsError) as raised:
        load_config(quickstart, [*wrong, "train.batch_size=64"])
    assert str(raised.value).startswith(f"{quickstart} with {named}:\n  ")
