"""The dry run as a user starts it."""

import json

import pytest

from stampede.engine.cli import main
from support.paths import ROOT
from support.predicting import run_command

PLAN = "configs/plan_10b.yaml"
SMALL = [PLAN, "data.tables={user: 1e8, item: 1000}", "train.batch_size=8192",
         "evaluate.batch_size=8192"]  # fmt: skip
GPUS = ["--plan", "--world-size", "16", "--device-memory"]


@pytest.fixture(autouse=True)
def _in_the_checkout(monkeypatch):
    monkeypatch.chdir(ROOT)


def test_what_fits_ends_with_status_0(tmp_path):
    out = tmp_path / "plan.json"
    status, said = run_command(
        main, *GPUS, "80GiB", "--devices-per-node", 4, "--plan-out", out, *SMALL
    )
    assert status == 0, said
    assert "fits: " in said and "100,001,000 rows" in said
    cluster = json.loads(out.read_text())["cluster"]
    assert (cluster["memory"], cluster["local_world_size"]) == (80 * 2**30, 4)


def test_what_does_not_fit_ends_with_status_1_and_the_shortfall():
    status, said = run_command(main, *GPUS, "512MB", *SMALL)
    assert status == 1 and "does not fit" in said
    assert "error: rank " in said and "too much" in said


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([*GPUS, "80GB", "configs/criteo_kaggle.yaml"], "data.path is not given"),
        ([*GPUS, "80GB", "configs/criteo_kaggle.yaml", "data.path=absent.tsv"], "absent.tsv: no"),
        (
            [*GPUS, "80GB", "configs/table.yaml", "data.kind=prepared", "data.path=absent"],
            "no prepared data here",
        ),
        ([*GPUS, "80", *SMALL], "--device-memory: found '80'; write a number above 0 and a unit"),
        ([*GPUS, "80GB", *SMALL, "train.batch_size=100"], "number of ranks, 16"),
        ([*GPUS, "80GB", *SMALL, "--devices-per-node", "5"], "write 15 or 20 devices"),
        ([*GPUS, "80GB", *SMALL, "data.tables={user: 1.5}"], "data.tables.user: found 1.5"),
        (["--plan", *SMALL], "--world-size is not given"),
        (["--plan", "--world-size", "0", "--device-memory", "1GB", *SMALL], "found 0"),
        (["--world-size", "16", *SMALL], "write --plan too"),
        ([*SMALL], "has no clicks to train on"),
    ],
)
def test_mistakes_get_a_sentence_and_status_2(arguments, words):
    status, said = run_command(main, *arguments)
    assert status == 2, said
    assert words in said
