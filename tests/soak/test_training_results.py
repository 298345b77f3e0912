"""The results that the project promises, from whole runs."""

import json
import subprocess
import sys

import pytest

from support.paths import ROOT, shared

pytestmark = pytest.mark.slow


def launch(*arguments):
    done = subprocess.run(
        [sys.executable, str(ROOT / "launch.py"), *arguments], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_quickstart_reaches_nine_tenths_of_the_attainable_auc(tmp_path):
    launch("configs/quickstart.yaml", f"run.dir={tmp_path}")
    summary = json.loads((tmp_path / "quickstart/summary.json").read_text())
    assert summary["batch_size"] == 8192
    assert (summary["auc"] - 0.5) / (summary["attainable_auc"] - 0.5) >= 0.90
    assert 0 < summary["clipped_share"] < 1


# One seed each; configs/sweeps/authors_code.yaml runs more. The margins allow for the seed.
@pytest.mark.parametrize(
    "setting, margin, epochs",
    [
        pytest.param("baseline_1024", 0.004, 3, marks=pytest.mark.soak),
        ("cowclip_1024", 0.004, 3),
        pytest.param("cowclip_8192", 0.005, 5, marks=pytest.mark.soak),
    ],
)
def test_real_clicks_against_the_authors_code(tmp_path, setting, margin, epochs):
    log = shared("data/criteo_kaggle_137k.tsv.gz")
    reference = json.loads(shared("golden/criteo_137k_reference.json").read_text())
    overrides = {
        "baseline_1024": "train.batch_size=1024 optim.embedding.clip=null optim.dense.lr=1e-4 "
        "optim.dense.schedule.warmup=0 model.init_std=1e-4 optim.scaling.rule=none",
        "cowclip_1024": "train.batch_size=1024",
        "cowclip_8192": "train.batch_size=8192",
    }[setting].split()
    launch(
        "configs/criteo_kaggle.yaml", "preset=paper", f"data.path={log}",
        f"data.cache={tmp_path}/cache", f"run.dir={tmp_path}",
        "evaluate.select_on=test", f"train.epochs={epochs}", *overrides,
    )  # fmt: skip
    summary = json.loads((tmp_path / "criteo_kaggle/summary.json").read_text())
    assert summary["best_auc"] > reference["summary"][setting]["best_auc_mean"] - margin
