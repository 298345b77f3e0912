"""The launcher as a user starts it."""

import json
import os
import subprocess
import sys

import pytest
import yaml

from support.jobs import SMALL
from support.paths import ROOT, shared

PYTHON = [sys.executable]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def launch(*arguments, command=PYTHON, cwd=ROOT):
    environment = {
        key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")
    }
    return subprocess.run(
        [*command, str(ROOT / "launch.py"), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=cwd,
        env=environment,
    )


@pytest.mark.parametrize(
    "command, ranks",
    [
        (PYTHON, 1),
        ([*TORCHRUN, "--standalone"], 1),
        ([*TORCHRUN, "--standalone", "--nproc_per_node", "2"], 2),
    ],
)
def test_trains(tmp_path, command, ranks):
    done = launch(
        "configs/quickstart.yaml", f"run.dir={tmp_path}", *SMALL, "data.scale=0.001",
        command=command,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "quickstart/summary.json").read_text())
    assert summary["world_size"] == ranks
    assert done.stdout.count("attainable AUC") == 1
    assert "samples/s" in done.stderr  # the progress bar
    assert "Traceback" not in done.stderr


def test_real_clicks(tmp_path):
    log = shared("data/criteo_kaggle_137k.tsv.gz")
    done = launch(
        "configs/criteo_kaggle.yaml", f"data.path={log}", f"run.dir={tmp_path}",
        f"data.cache={tmp_path}/cache", "model.hidden=[32]", "train.epochs=2",
        "train.batch_size=1024", "optim.dense.schedule.warmup=0.2",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "criteo_kaggle/summary.json").read_text())
    assert 0.68 < summary["auc"] < 0.75
    assert summary["attainable_auc"] is None


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["absent.yaml"], "absent.yaml: no such file"),
        (["configs/quickstart.yaml", "train.epoch=3"], "did you mean 'epochs'?"),
        (["configs/criteo_kaggle.yaml"], "data.path is not given"),
        (["configs/criteo_kaggle.yaml", "data.path=absent.tsv"], "absent.tsv: no such file"),
        (["configs/quickstart.yaml", "run.device=cuda"], "run.device"),
        (["configs/quickstart.yaml", "run.dir=/proc/none"], "/proc/none"),
        (["configs/quickstart.yaml", "--prnt-config"], "--prnt-config"),
        ([], "required: CONFIG.yaml\n"),
    ],
)
def test_mistakes_get_a_sentence_and_status_2(arguments, words):
    import torch

    if "run.device=cuda" in arguments and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = launch(*arguments, *(SMALL if "run.dir=/proc/none" in arguments else []))
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_loss_that_is_not_finite_names_the_step(tmp_path):
    done = launch(
        "configs/quickstart.yaml", *SMALL, f"run.dir={tmp_path}", "optim.dense.lr=1e38",
        "optim.dense.schedule.warmup=0",
    )  # fmt: skip
    assert done.returncode == 1
    assert "at step" in done.stderr and "optim.dense.lr" in done.stderr
    assert "Traceback" not in done.stderr


def test_print_config_is_whole_and_valid(tmp_path):
    done = launch(
        "configs/quickstart.yaml",
        "train.epochs=7",
        "--print-config",
        cwd=tmp_path,
    )
    assert done.returncode == 2  # the path is relative to where the user is
    done = launch(ROOT / "configs/quickstart.yaml", "train.epochs=7", "--print-config")
    printed = yaml.safe_load(done.stdout)
    assert printed["train"]["epochs"] == 7
    assert printed["optim"]["embedding"]["clip"]["ratio"] == 1.0


def test_help_lists_configurations_and_keys():
    done = launch("--help")
    assert done.returncode == 0
    for word in ("configs/quickstart.yaml", "configs/criteo_kaggle.yaml", "train.batch_size",
                 "section.key=value", "torchrun"):  # fmt: skip
        assert word in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100
