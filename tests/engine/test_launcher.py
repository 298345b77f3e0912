"""The launcher as a user starts it."""

import json

import numpy as np
import pytest
import torch

from stampede.data.prepare import main as prepare
from stampede.engine.cli import main
from support.jobs import SMALL
from support.paths import ROOT
from support.predicting import run_command

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _in_the_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)


def launch(*arguments):
    """Exit status of the launcher in this process, and what it said."""
    return run_command(main, *arguments)


TABLE = """
label: y
ids: {user: {min_count: 2}, tags: {separator: "|"}}
weight: w
"""


def test_a_table_with_bags_and_weights(tmp_path):
    """Tags decide the label; rows with weight 0 say the contrary."""
    draw = np.random.default_rng(0)
    lines = ["y,user,tags,w"]
    for i in range(4000):
        tags = draw.choice(["a", "b", "c"], draw.integers(0, 3), replace=False)
        lies = i % 3 == 0
        lines.append(
            f"{int(('a' in tags) != lies)},u{draw.integers(30)},{'|'.join(tags)},{0 if lies else 2}"
        )
    (tmp_path / "log.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "schema.yaml").write_text(TABLE)
    log, schema, folder = (str(tmp_path / name) for name in ("log.csv", "schema.yaml", "folder"))
    assert prepare(["table", log, "--schema", schema, "--out", folder]) == 0
    keys = ["data.kind=prepared", f"data.path={folder}"]
    status, said = launch(
        "configs/table.yaml", *keys, f"run.dir={tmp_path}", "model.hidden=[16]",
        "train.epochs=3", "train.batch_size=256", "optim.embedding.lr=3e-2",
        "optim.dense.lr=1e-2",
    )  # fmt: skip
    assert status == 0, said
    summary = json.loads((tmp_path / "table/summary.json").read_text())
    assert summary["auc"] > 0.99 and summary["logloss"] < 0.3


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["absent.yaml"], "absent.yaml: no such file"),
        (["configs/criteo_kaggle.yaml"], "data.path is not given"),
        (["configs/criteo_kaggle.yaml", "data.path=absent.tsv"], "absent.tsv: no such file"),
        (["configs/quickstart.yaml", "run.device=cuda"], "run.device"),
        (["configs/quickstart.yaml", "run.dir=/proc/none"], "/proc/none"),
    ],
)
def test_mistakes_get_a_sentence_and_status_2(arguments, words):
    if "run.device=cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    status, said = launch(*arguments, *(SMALL if "run.dir=/proc/none" in arguments else []))
    assert status == 2
    assert words in said


def test_an_unknown_option_is_named(capsys):
    with pytest.raises(SystemExit) as end:
        main(["configs/quickstart.yaml", "--prnt-config"])
    assert end.value.code == 2 and "--prnt-config" in capsys.readouterr().err
