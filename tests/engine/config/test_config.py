"""What a wrong configuration gets: the key, what was found, what to write."""

import subprocess
import sys

import pytest
import yaml

from stampede.engine.config import Config, config_type, optim, to_yaml
from stampede.engine.config.load import load_config
from stampede.optim.sharded import supported
from stampede.settings import SettingsError, all_keys
from support.paths import ROOT
from support.waiting import HANG

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))

# What is in the file or among the overrides, and words of the sentence it gets.
IN_FILE = [
    ("trian:\n  epochs: 3", ["trian: unknown key; did you mean 'train'?"]),
    ("batch_size: 3", ["batch_size: unknown key", "'train.batch_size'"]),
    ("train: 3", ["train: found 3", "a section with keys"]),
    ("a: [", ["line 1", "not valid YAML"]),
]
OVERRIDES = [
    ("train.xyz=3", ["train.xyz: unknown key; allowed here: ", "batch_size, "]),
    ("optim.embedding.clip.rato=1", ["optim.embedding.clip.rato", "'ratio'"]),
    ("train.batch_size=1.5", ["train.batch_size: found 1.5", "a whole number"]),
    ("train.batch_size=0", ["train.batch_size: found 0", "greater than or equal to 1"]),
    ("train.epochs=0", ["train.epochs: found 0", "greater than or equal to 1"]),
    ("run.overwrite=1", ["run.overwrite: found 1", "true or false"]),
    ("model.hidden=400", ["model.hidden: found 400", "a list"]),
    ("optim.embedding.lr=.inf", ["optim.embedding.lr: found inf", "finite"]),
    ("sharding.plan=rowwise", ["sharding.plan: found 'rowwise'", "did you mean 'row_wise'?"]),
    ("data.kind=criteo", ["data.kind: found 'criteo'", "'synthetic', 'criteo_kaggle'"]),
    (
        "model.name=dcnv2 model.options.expert=2",
        ["model.options.expert: unknown key with name: dcnv2", "'experts'"],
    ),
    ("data.validation_fraction=0", ["evaluate.select_on", "data.validation_fraction"]),
    (
        "data.kind=table data.path=a.csv data.schema_file=b.yaml data.validation_fraction=0",
        ["evaluate.select_on", "data.validation_fraction"],
    ),
    (
        "optim.dense.betas=[0.9,1.0]",
        ["optim.dense.betas: found (0.9, 1.0); write two numbers"],
    ),
    ("optim.embedding.weight_decay=-1", ["weight_decay: found -1", "greater than or equal to 0"]),
    (
        "optim.dense.schedule.warmup=-1",
        [
            "with optim.dense.schedule.warmup=-1:",
            "optim.dense.schedule.warmup: found -1",
            "least 0",
        ],
    ),
    ("optim.embedding.eps=0", ["optim.embedding.eps: found 0", "above 0"]),
    ("optim.dense.schedule.decay=linear", ["optim.dense.schedule.decay", "'step'"]),
    ("optim.embedding.optimizer=adamw", ["embedding.optimizer: found 'adamw'", "'adam'"]),
    ("optim.embedding.momentum=0.9", ["momentum: not for optimizer: adam, only for", "sgd"]),
    (
        "optim.embedding.clip.granularity=global",
        ["clip.granularity: found 'global'", "'none', 'row', 'cowclip'"],
    ),
    ("optim.embedding.clip.granularity=row", ["clip: granularity 'row' needs a threshold"]),
    ("optim.embedding.ar_alpha=1", ["optim.embedding.ar_alpha: unknown key"]),
    ("optim.embedding.optimizer=fbgemm_adam", ["found 'fbgemm_adam'; write one of 'adam'"]),
    *(
        (f"evaluate.metrics=[{metric}]", [words])
        for metric, words in (("gauc", "'gauc' but group_by is not given"), ("aucc", "mean 'auc'"))
    ),
    (
        "optim.embedding.schedule.decay=cosine optim.embedding.schedule.every=2",
        ["optim.embedding.schedule.every: found 2.0", "'cosine' does not use", "decay 'step'"],
    ),
    (
        "optim.dense.schedule.decay=cosine optim.dense.schedule.warmup=1 train.epochs=1",
        ["optim.dense.schedule.decay is 'cosine'", "train.epochs 1", "below 1"],
    ),
    (
        "data.kind=prepared data.rows=3 data.cache=x",
        [
            "  data.rows: not for kind: prepared, only for kind: synthetic; leave it out, "
            "or write kind: synthetic",
            "  data.cache: not for kind: prepared, only for kind: criteo_kaggle, criteo_1tb, avazu",
        ],
    ),
    ("run.name=../x", ["run.name: found '../x'"]),
    *(
        (override, ["section.key=value"])
        for override in ("epochs=3", "train.epochs", "train.=3", "=3")
    ),
    ("train.batch_size=8193", ["train.batch_size: 8193", "number of ranks, 2", "8192 or 8194"]),
    ("evaluate.batch_size=3", ["evaluate.batch_size: 3", "number of ranks, 2"]),
    ("train.reproducible=true train.tiles=1", ["train.tiles: 1", "number of ranks, 2"]),
    ("train.tiles=12", ["train.tiles: 12 is not a power of two"]),
    ("train.compile=cuda_graphs run.device=cpu", ["train.compile: found 'cuda_graphs', which"]),
    ("optim.embedding.optimizer=helen", ["embedding.optimizer: found 'helen'", "'adam'"]),
    (
        "train.reproducible=true sharding.plan=column_wise",
        ["sharding.plan", "'column_wise'", "write auto or table_wise or row_wise"],
    ),
    *(
        (f"train.reproducible=true {more}", [words, "train.reproducible forbids"])
        for more, words in (
            ("sharding.communication.forward=bf16", "sharding.communication.forward"),
            ("sharding.communication.backward=bf16", "sharding.communication.backward"),
            ("train.compile=default", "train.compile: with 'default'"),
        )
    ),
]


@pytest.mark.parametrize(
    "text, overrides, words",
    [(text, "", words) for text, words in IN_FILE] + [("", *case) for case in OVERRIDES],
)
def test_a_wrong_configuration_gets_a_sentence(tmp_path, text, overrides, words):
    path = tmp_path / "job.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError) as failure:
        load_config(path, overrides.split(), world_size=2)
    for word in words:
        assert word in str(failure.value)
    # A name on the command line has the file's place, and a bad override has none.
    is_of_no_file = "run.name" in overrides or "section.key=value" in words
    assert is_of_no_file or str(path) in str(failure.value)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_shipped_configurations_load_and_read_back(path, tmp_path):
    config = load_config(path, ["optim.dense.lr=1e-4"], world_size=2)
    assert config.run.name == path.stem and config.optim.dense.lr == 1e-4
    assert path.read_text().startswith("# ")
    printed = tmp_path / "printed.yaml"
    printed.write_text(to_yaml(config))
    assert load_config(printed) == config
    assert set(yaml.safe_load(printed.read_text())) == set(Config.model_fields)


def test_every_key_is_described():
    assert all(key.description for key in all_keys(config_type()))


def test_its_choices_are_the_optimizers_own():
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
    "wrong",
    [
        ["train.epochs=0"],
        ["optim.embedding.clip={granularity: rowx}"],
        ["data.path=x", "data.schema_file=y"],
        ["train.epoch=3"],
    ],
)
def test_a_mistake_names_the_override_that_made_it(wrong):
    quickstart = ROOT / "configs/quickstart.yaml"
    with pytest.raises(SettingsError) as raised:
        load_config(quickstart, [*wrong, "train.batch_size=64"])
    assert str(raised.value).startswith(f"{quickstart} with {' '.join(wrong)}:\n  ")
