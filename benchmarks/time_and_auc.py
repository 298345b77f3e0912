"""Seconds of training and test AUC by batch size, beside plain PyTorch, on clicks like Criteo's.

`stampede synthetic --criteo SHARE` writes a part of a log like Criteo Kaggle's, whose attainable
AUC is known; `stampede prepare` prepares it once. launch.py trains DeepFM with two layers of 128
units and the recipe; only the batch size differs. Plain PyTorch (peers/plain_pytorch.py) trains the
same network on the same rows with SparseAdam and as many epochs, at torch's usual rate of 1e-3, or
with larger batches that rate times the root of how much larger they are; of its epochs the best by
the test AUC counts. Each has one core; as many run at a time as there are cores.

    python benchmarks/time_and_auc.py    # and its picture, time_and_auc.png
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from full_size import attainable_auc
from launched import run_program
from machine import CORES
from matplotlib.figure import Figure
from report import ROOT, Report, command_line, markdown

from stampede.data.prepared.manifest import read_manifest

# More than ten million training rows: the recipe takes two epochs at every batch size.
SHARE, QUICK_SHARE = 1 / 4, 1 / 4096
SPLIT = ("validation_fraction=0.025", "test_fraction=0.05")
HIDDEN, EPOCHS = (128, 128), 2
CONTENDERS = {"stampede": "#0f766e", "plain PyTorch": "#c2410c"}
BATCHES, QUICK_BATCHES = (1024, 8192, 131_072), (256, 1024)
PLAIN_PROGRAM, RATE = ROOT / "benchmarks/peers/plain_pytorch.py", 1e-3


def time_and_auc(options: argparse.Namespace, report: Report) -> str:
    """Seconds and AUC of all contenders."""
    share = QUICK_SHARE if options.quick else options.share
    batches = QUICK_BATCHES if options.quick else BATCHES
    wanted = [("stampede", batch, None) for batch in batches]
    for batch in batches:
        rates = sorted({RATE, RATE * (batch / batches[0]) ** 0.5})
        wanted += [("plain PyTorch", batch, rate) for rate in rates]
    found = []
    if options.keep_plain:
        kept = json.loads(options.out.read_text())["found"]
        found = [{"lr": RATE, **one} for one in kept if one["contender"] != "stampede"]
        known = {(one["batch"], one["lr"]) for one in found}
        wanted = [one for one in wanted if one[1:] not in known]
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        folder = Path(scratch)
        prepared = options.prepared or _prepared(share, folder)
        manifest = read_manifest(prepared)
        rows = {part: manifest.rows(part) for part in ("train", "validation", "test")}
        report.add(share=share, rows=rows, attainable_auc=attainable_auc(), found=found)
        with ThreadPoolExecutor(CORES) as pool:
            begun = [
                pool.submit(ours, prepared, batch, folder)
                if lr is None
                else pool.submit(plain, prepared, batch, lr)
                # What takes longest begins first.
                for _, batch, lr in reversed(wanted)
            ]
            for one in begun:
                report.add(found=[*report.found["found"], one.result()])
    draw(report.found["found"], options.out.with_suffix(".png"))
    return table(report.found)


def _prepared(share: float, folder: Path) -> Path:
    """A part of the log, prepared."""
    log, prepared = folder / "log/train.txt", folder / "prepared"
    run_program(["-m", "stampede", "synthetic", log.parent, "--criteo", str(share)])
    split = [word for setting in SPLIT for word in ("--set", setting)]
    run_program(["-m", "stampede", "prepare", "criteo_kaggle", log, "--out", prepared, *split])
    shutil.rmtree(log.parent)
    return prepared


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


def plain(prepared: Path, batch: int, lr: float) -> dict[str, Any]:
    """Plain PyTorch."""
    command = [PLAIN_PROGRAM, prepared, "--batch", batch, "--optimizer", "sparse_adam"]
    command += ["--threads", 1, "--epochs", EPOCHS, "--lr", lr, "--evaluate"]
    command += ["--hidden", *HIDDEN]
    done = json.loads(run_program(command, threads=1).said.splitlines()[-1])
    best = max(done["evaluations"], key=lambda one: one["auc"])
    every = {"epochs": EPOCHS, "evaluations": done["evaluations"]}
    return {"contender": "plain PyTorch", "batch": batch, "lr": lr, **every, **best}


def best(found: Sequence[dict[str, Any]], contender: str) -> list[dict[str, Any]]:
    """By batch, the entry with the highest AUC; others are of other rates."""
    entries = sorted(
        (one for one in found if one["contender"] == contender),
        key=lambda one: (one["batch"], one["auc"]),
    )
    return list({one["batch"]: one for one in entries}.values())


def draw(found: Sequence[dict[str, Any]], path: Path) -> None:
    """A picture of AUC and seconds by batch size."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    panels = figure.subplots(1, 2)
    for axes, key, title in zip(panels, ("auc", "seconds"), ("test AUC", "seconds"), strict=True):
        for contender, colour in CONTENDERS.items():
            entries = best(found, contender)
            batches, values = ([one[name] for one in entries] for name in ("batch", key))
            axes.plot(batches, values, "o-", color=colour, label=contender, lw=1.8, ms=6)
            for batch, value in zip(batches, values, strict=True):
                others = (one for who in CONTENDERS for one in best(found, who))
                highest = max(one[key] for one in others if one["batch"] == batch)
                above = 7 if value == highest else -15
                text = f"{value:.4f}" if key == "auc" else f"{value:.0f}"
                axes.annotate(
                    text, (batch, value), (0, above), textcoords="offset points", ha="center",
                    color=colour, fontsize=9, bbox={"fc": "white", "ec": "none", "pad": 0.5},
                )  # fmt: skip
        axes.set(xscale="log", xlabel="batch size", title=title)
        axes.set_xticks(batches, [f"{batch // 1024}K" for batch in batches], minor=False)
        axes.minorticks_off()
        axes.margins(0.15, 0.25)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    panels[1].set_ylim(bottom=0)
    panels[0].legend(frameon=False, loc="lower left")
    figure.savefig(path, dpi=120)


def _place(one: dict[str, Any]) -> tuple[bool, int, float]:
    """Of an entry in the table."""
    return one["contender"] != "stampede", one["batch"], one.get("lr", 0.0)


def table(found: dict[str, Any]) -> str:
    """The results as Markdown."""
    heads = ["contender", "batch", "rate", "seconds", "test AUC", "logloss"]
    rows = [
        [
            one["contender"], f"{one['batch']:,}", f"{one['lr']:.2g}" if "lr" in one else "recipe",
            f"{one['seconds']:,.0f}", f"{one['auc']:.4f}", f"{one['logloss']:.4f}",
        ]
        for one in sorted(found["found"], key=_place)
    ]  # fmt: skip
    known = f"{found['rows']['train']:,} training rows; attainable AUC"
    return f"{known} {found['attainable_auc']:.4f}\n\n{markdown(heads, rows)}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--share", type=float, default=SHARE, help="of Criteo Kaggle's rows")
    parser.add_argument("--prepared", type=Path, help="the prepared rows; default: made anew")
    kept = "keep plain PyTorch's results, and measure only what they lack"
    parser.add_argument("--keep-plain", action="store_true", help=kept)
    command_line(time_and_auc, parser=parser)
