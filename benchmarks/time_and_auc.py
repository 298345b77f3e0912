"""Seconds of training and test AUC by batch size, beside plain PyTorch, on clicks like Criteo's.

`stampede synthetic --criteo SHARE` writes a part of a log like Criteo Kaggle's, whose attainable
AUC is known; `stampede prepare` prepares it once. launch.py trains DeepFM with two layers of 128
units and the recipe; only the batch size differs. Plain PyTorch (peers/plain_pytorch.py) trains the
same network on the same rows with SparseAdam, torch's usual rate of 1e-3 at every batch size and as
many epochs; of its epochs the best by the test AUC counts. Each has one core; as many run at a time
as there are cores.

    python benchmarks/time_and_auc.py
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from full_size import attainable_auc
from launched import run_program
from machine import CORES
from report import ROOT, Report, command_line, markdown

from stampede.data.prepared.manifest import read_manifest

# More than ten million training rows: the recipe takes two epochs at every batch size.
SHARE, QUICK_SHARE = 1 / 4, 1 / 4096
SPLIT = ("validation_fraction=0.025", "test_fraction=0.05")
HIDDEN, EPOCHS = (128, 128), 2
OURS, PLAIN = (1024, 8192, 131_072), (1024, 131_072)
PLAIN_PROGRAM, RATE = ROOT / "benchmarks/peers/plain_pytorch.py", 1e-3

_COMMAND = "import sys; from stampede.engine.cli import stampede; sys.exit(stampede())"


def time_and_auc(options: argparse.Namespace, report: Report) -> str:
    """Seconds and AUC of all contenders."""
    share = QUICK_SHARE if options.quick else options.share
    batches = {"stampede": OURS, "plain PyTorch": PLAIN}
    if options.quick:
        batches = {name: (256, 1024) for name in batches}
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        folder = Path(scratch)
        run_program(["-c", _COMMAND, "synthetic", folder / "log", "--criteo", str(share)])
        log, prepared = folder / "log/train.txt", folder / "prepared"
        split = [word for setting in SPLIT for word in ("--set", setting)]
        run_program(["-c", _COMMAND, "prepare", "criteo_kaggle", log, "--out", prepared, *split])
        shutil.rmtree(folder / "log")
        manifest = read_manifest(prepared)
        rows = {part: manifest.rows(part) for part in ("train", "validation", "test")}
        report.add(share=share, rows=rows, attainable_auc=attainable_auc(), found=[])
        train = {"stampede": ours, "plain PyTorch": plain}
        with ThreadPoolExecutor(CORES) as pool:
            begun = [
                pool.submit(train[name], prepared, batch, folder)
                for name, sizes in batches.items()
                for batch in sizes
            ]
            for one in begun:
                report.add(found=[*report.found["found"], one.result()])
    return table(report.found)


def ours(prepared: Path, batch: int, folder: Path) -> dict[str, Any]:
    """A run of the launcher with the recipe."""
    name = f"batch-{batch}"
    (folder / f"{name}.yaml").write_text("")
    given = ["data.kind=prepared", f"data.path={prepared}", f"train.batch_size={batch}"]
    given += [f"run.dir={folder}", f"run.name={name}", "evaluate.compare_with_lr=false"]
    given += [f"model.hidden={list(HIDDEN)}"]
    run_program([ROOT / "launch.py", folder / f"{name}.yaml", *given], threads=1)
    summary = json.loads((folder / name / "summary.json").read_text())
    return {
        "contender": "stampede",
        "batch": batch,
        "seconds": summary["train_seconds"],
        "auc": summary["auc"],
        "logloss": summary["logloss"],
        "epochs": summary["epochs"],
    }


def plain(prepared: Path, batch: int, folder: Path) -> dict[str, Any]:
    """Plain PyTorch."""
    command = [PLAIN_PROGRAM, prepared, "--batch", batch, "--optimizer", "sparse_adam"]
    command += ["--threads", 1, "--epochs", EPOCHS, "--lr", RATE, "--evaluate"]
    command += ["--hidden", *HIDDEN]
    done = json.loads(run_program(command, threads=1).said.splitlines()[-1])
    best = max(done["evaluations"], key=lambda one: one["auc"])
    every = {"epochs": EPOCHS, "evaluations": done["evaluations"]}
    return {"contender": "plain PyTorch", "batch": batch, **every, **best}


def table(found: dict[str, Any]) -> str:
    """The results as Markdown."""
    heads = ["contender", "batch", "epochs", "seconds", "test AUC", "logloss"]
    rows = [
        [
            one["contender"], f"{one['batch']:,}", one["epochs"], f"{one['seconds']:,.0f}",
            f"{one['auc']:.4f}", f"{one['logloss']:.4f}",
        ]
        for one in found["found"]
    ]  # fmt: skip
    known = f"{found['rows']['train']:,} training rows; attainable AUC"
    return f"{known} {found['attainable_auc']:.4f}\n\n{markdown(heads, rows)}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--share", type=float, default=SHARE, help="of Criteo Kaggle's rows")
    command_line(time_and_auc, parser=parser)
