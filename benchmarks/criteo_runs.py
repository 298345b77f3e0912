"""Runs of the launcher on a Criteo file, once for each configuration."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from stampede.engine.config.load import load_config
from stampede.engine.run_folder import RunFolder
from stampede.engine.sweep.run import difference

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "configs/criteo_kaggle.yaml"


def train(name: str, overrides: list[str], data: Path, runs: Path) -> dict:
    """Train and choose the best epoch on the test part; read the result of a finished run.

    Args:
        name: of the run.
        overrides: of the configuration.
        data: Criteo file.
        runs: folder of the run folders.

    Returns:
        The run's summary and its smallest logloss.
    """
    overrides = [
        "preset=paper",
        *overrides,
        f"data.path={data}",
        f"run.dir={runs}",
        f"run.name={name}",
        "run.overwrite=true",
        "evaluate.select_on=test",
        "checkpoint.keep=1",
    ]
    folder = runs / name
    config = load_config(CONFIG, overrides)
    if not ((folder / "summary.json").exists() and not difference(config, RunFolder(folder))):
        subprocess.run([sys.executable, ROOT / "launch.py", CONFIG, *overrides], check=True)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    evaluations = [e for e in map(json.loads, lines) if e["kind"] == "evaluation"]
    summary = json.loads((folder / "summary.json").read_text())
    return {**summary, "min_logloss": min(e["logloss"] for e in evaluations)}
