"""Model quality: every shipped configuration of a real log against other projects' models.

Ours are launched as a user would, `python launch.py CONFIG data.path=LOG`, changing only paths, the
seed and the network's name. The others are scikit-learn's logistic regression, LightGBM and
FuxiCTR's DeepFM (peers/raw_logs.py). All read the same file and have the same training, validation
and test rows; choices are made on the validation part. Seconds are of the whole process from the
raw file to the scores, including tuning.

    python benchmarks/quality.py --data ../shared/data
    python benchmarks/quality.py --logs criteo --subsets whole --peers lr --models lr fm --resume
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import math
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import yaml
from launched import run_program
from report import ROOT, Report, begin
from tqdm import tqdm

from stampede.data.sources import Assignment, open_source
from stampede.engine.config.load import load_config

PEER_PROGRAM = ROOT / "benchmarks/peers/raw_logs.py"
TABLE = ROOT / "configs/table.yaml"

# Packages outside the project, installed into a separate environment.
PACKAGES = {"lightgbm": "lightgbm>=4,<5", "fuxictr": "fuxictr==2.3.10"}
PEERS = {"lr": "scikit-learn LR", "lightgbm": "LightGBM", "fuxictr": "FuxiCTR DeepFM"}

# Networks for the whole first log; elsewhere only the configuration's own.
MODELS = ("lr", "fm", "deepfm", "dcnv2", "wide_deep", "dcn")
MAIN = ("criteo", "whole")

SUBSETS = {"whole": 1, "half": 2, "fifth": 5}
QUICK_ROWS = 3000

# Fields that identify a measurement.
_KEY = ("log", "rows", "contender", "seed", "data")


@dataclass(frozen=True)
class Log:
    """A real log.

    Attributes:
        name: in the table.
        file: its name in `--data`.
        config: the configuration shipped for it.
        header: whether its first line names the columns.
        schema: of its columns, for `configs/table.yaml`.
    """

    name: str
    file: str
    config: Path
    header: bool
    schema: dict[str, Any]


_NUMBERS, _IDS = [f"I{i}" for i in range(1, 14)], [f"C{i}" for i in range(1, 27)]
_AVAZU_IDS = [
    "C1",
    "banner_pos",
    *(f"{of}_{what}" for of in ("site", "app") for what in ("id", "domain", "category")),
    *(f"device_{what}" for what in ("id", "ip", "model", "type", "conn_type")),
    *(f"C{i}" for i in range(14, 22)),
]
LOGS = {
    "criteo": Log(
        "criteo",
        "criteo_kaggle_137k.tsv.gz",
        ROOT / "configs/criteo_kaggle.yaml",
        header=False,
        schema={
            "separator": "\t",
            "quote": "",
            "columns": ["label", *_NUMBERS, *_IDS],
            "label": "label",
            "numbers": _NUMBERS,
            "ids": _IDS,
        },
    ),
    "avazu": Log(
        "avazu",
        "avazu_20k.csv.gz",
        ROOT / "configs/avazu.yaml",
        header=True,
        schema={
            "separator": ",",
            "label": "click",
            "ids": {
                "hour_of_day": {"encode": "hour_of_day"},
                "weekday": {"encode": "weekday"},
                **{name: {} for name in _AVAZU_IDS},
            },
            "time": {"column": "hour", "format": "%y%m%d%H"},
        },
    ),
}

CONFIGS = [*(log.config.stem for log in LOGS.values()), TABLE.stem]


@dataclass(frozen=True)
class Contender:
    """A model to measure on some rows.

    Attributes:
        name: in the table.
        peer: its key in `PEERS`; empty for one of ours.
        config: if one of ours.
        overrides: of the configuration, without paths and seed.
    """

    name: str
    peer: str = ""
    config: Path | None = None
    overrides: tuple[str, ...] = ()

    @property
    def seeded(self) -> bool:
        """Whether the result depends on the seed."""
        return self.peer != "lr"


@dataclass(frozen=True)
class Rows:
    """Rows of a log, in a file of its format.

    Attributes:
        log: the log.
        name: which rows: `whole`, `half 1`.
        file: the file, not compressed.
        parts_file: part of each row, .npy.
        counts: rows of the training, the validation and the test part.
        split: overrides that make any configuration split the rows in this way.
        digest: of the file and the parts.
    """

    log: Log
    name: str
    file: Path
    parts_file: Path
    counts: tuple[int, int, int]
    split: tuple[str, ...]
    digest: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--data", type=Path, default=ROOT.parent / "shared/data", help="folder of the logs"
    )
    parser.add_argument("--logs", nargs="+", choices=LOGS, default=list(LOGS))
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument(
        "--configs",
        nargs="*",
        choices=CONFIGS,
        default=list(CONFIGS),
        help=f"of {', '.join(CONFIGS)}; without a name: none",
    )
    parser.add_argument("--subsets", nargs="+", choices=SUBSETS, default=list(SUBSETS))
    parser.add_argument(
        "--draws", type=int, default=1, help="number of random halves and of random fifths"
    )
    parser.add_argument(
        "--seeds", type=int, default=3, help="number of seeds, from 1; LR has no randomness"
    )
    parser.add_argument(
        "--models",
        nargs="*",
        help=f"networks of the log's own configuration everywhere; default: {', '.join(MODELS)} on "
        "the whole Criteo sample, elsewhere the configuration's own; without a name: only that",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep the results in --out; delete those of other code first",
    )
    options, report = begin("quality", parser)
    if options.quick:
        options.seeds, options.subsets, options.draws = 1, ["whole"], 1
        options.models = options.models or []
    logs = {name: options.data / LOGS[name].file for name in options.logs}
    for path in logs.values():
        if not path.exists():
            sys.exit(f"error: {path}: no such file; name the folder of the logs with --data")
    found: list[dict[str, Any]] = []
    if options.resume and options.out.exists():
        runs = json.loads(options.out.read_text()).get("runs", [])
        found = [run for run in runs if "failed" not in run]
    pythons = environment(options.folder / "quality-peers", options.peers)
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        measure(options, logs, found, report, pythons, Path(scratch))
    print(tables(report.found))
    report.close()
    failed = [row["contender"] for row in found if "failed" in row]
    if failed:
        sys.exit(f"error: failed, see the table: {', '.join(sorted(set(failed)))}")


def measure(
    options: argparse.Namespace,
    logs: dict[str, Path],
    found: list[dict[str, Any]],
    report: Report,
    pythons: dict[str, str | Exception],
    scratch: Path,
) -> None:
    """Make all requested measurements that are missing; a failure is also recorded.

    Args:
        options: of the command line.
        logs: file of each log.
        found: the measurements; grows.
        report: is written after each.
        pythons: interpreter of each peer, or why there is none.
        scratch: folder for rows and runs.
    """
    known = {tuple(run[name] for name in _KEY) for run in found}
    for name, path in logs.items():
        runs = [
            (rows, one, seed)
            for rows in write_subsets(LOGS[name], path, options, scratch)
            for one in contenders(rows, options.peers, options.configs, options.models)
            for seed in range(1, options.seeds + 1 if one.seeded else 2)
        ]
        for rows, one, seed in tqdm(runs, desc=name, unit="run", ncols=100):
            run = {"log": name, "rows": rows.name, "parts": rows.counts, "contender": one.name}
            run |= {"seed": seed, "data": rows.digest}
            if tuple(run[key] for key in _KEY) in known:
                continue
            folder, start = scratch / "run", time.perf_counter()
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            try:
                if one.peer:
                    scores = run_peer(rows, one.peer, seed, pythons[one.peer], folder)
                else:
                    scores = train_ours(rows, one, seed, folder)
            except RuntimeError as failure:
                tqdm.write(f"{one.name} on {name} {rows.name}: {failure}", sys.stderr)
                scores = {"failed": str(failure).strip().splitlines()[-1][:300]}
            found.append({**run, "seconds": time.perf_counter() - start, **scores})
            report.add(runs=found)


def contenders(
    rows: Rows, peers: list[str], configs: list[str], models: list[str] | None
) -> list[Contender]:
    """The contenders on some rows: logistic regression, ours, the other peers.

    Args:
        rows: on which.
        peers: names of the peers.
        configs: names of ours.
        models: see `--models`.
    """
    if models is None:
        models = list(MODELS) if (rows.log.name, rows.name) == MAIN else []
    ours = []
    for config, overrides in (
        (rows.log.config, rows.split),
        (TABLE, (f"data.schema_file={rows.file.with_suffix('.yaml')}", *rows.split)),
    ):
        if config.stem not in configs:
            continue
        own = load_config(config, [f"data.path={rows.file}", *overrides]).model.name
        chosen = (models if config != TABLE else []) or [own]
        for model in chosen:
            named = () if model == own else (f"model.name={model}",)
            ours.append(Contender(f"{config.name} {model}", "", config, (*overrides, *named)))
    others = [Contender(PEERS[peer], peer) for peer in peers]
    return [*others[: "lr" in peers], *ours, *others["lr" in peers :]]


def write_subsets(
    log: Log, path: Path, options: argparse.Namespace, scratch: Path
) -> Iterator[Rows]:
    """The whole log, and random rows of it in their order, each in a file of the log's format."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rb") as file:
        lines = file.read().splitlines(keepends=True)
    head, lines = (lines[:1], lines[1:]) if log.header else ([], lines)
    if options.quick:
        lines = lines[:QUICK_ROWS]
    for subset in options.subsets:
        for draw in range(1, options.draws + 1 if subset != "whole" else 2):
            name = subset if subset == "whole" else f"{subset} {draw}"
            share = SUBSETS[subset]
            order = np.random.default_rng([share, draw]).permutation(len(lines))
            kept = np.sort(order[: len(lines) // share])
            suffix = ".csv" if log.header else ".tsv"
            file = scratch / f"{log.name}-{name.replace(' ', '-')}{suffix}"
            file.write_bytes(b"".join([*head, *(lines[i] for i in kept)]))
            file.with_suffix(".yaml").write_text(yaml.safe_dump(log.schema, sort_keys=False))
            yield divided(log, name, file, len(kept))


def divided(log: Log, name: str, file: Path, count: int) -> Rows:
    """So many rows in a file, split as in the log's configuration."""
    data = load_config(log.config, [f"data.path={file}"]).data
    source = open_source(data.kind, str(file), data)
    rows = SimpleNamespace(numbers=np.arange(count), file=0)
    parts = Assignment(source, [count]).parts(rows)
    parts_file = file.with_suffix(".npy")
    np.save(parts_file, parts)
    share = source.test_share if data.test_fraction is None else data.test_fraction
    overrides = (
        f"data.split={data.split}",
        f"data.test_fraction={share!r}",
        f"data.validation_fraction={data.validation_fraction!r}",
        f"data.seed={data.seed}",
    )
    digest = hashlib.sha256(file.read_bytes() + parts.tobytes()).hexdigest()[:12]
    counts = tuple(int((parts == part).sum()) for part in range(3))
    return Rows(log, name, file, parts_file, counts, overrides, digest)


def train_ours(rows: Rows, contender: Contender, seed: int, scratch: Path) -> dict[str, Any]:
    """Results of a launcher's run in the epoch chosen on the validation part.

    Raises:
        RuntimeError: it failed, or split the rows differently.
    """
    overrides = [
        f"data.path={rows.file}",
        f"data.cache={scratch / 'cache'}",
        f"run.dir={scratch}",
        "run.name=run",
        f"run.seed={seed}",
        *contender.overrides,
    ]
    run_program([ROOT / "launch.py", contender.config, *overrides])
    summary = json.loads((scratch / "run/summary.json").read_text())
    lines = (scratch / "run/metrics.jsonl").read_text().splitlines()
    evaluations = [line for line in map(json.loads, lines) if line["kind"] == "evaluation"]
    tested = [line for line in evaluations if line["part"] == "test"]
    if tested[0]["samples"] != rows.counts[2]:
        raise RuntimeError(
            f"the run has {tested[0]['samples']} test rows, the others {rows.counts[2]}"
        )
    test = next(line for line in tested if line["auc"] == summary["best_auc"])
    validation = next(
        line
        for line in evaluations
        if line["part"] == "validation" and line["step"] == test["step"]
    )
    return {
        "auc": test["auc"],
        "logloss": test["logloss"],
        "validation_auc": validation["auc"],
        "validation_logloss": validation["logloss"],
        "chosen": {"epoch": summary["best_epoch"], "of": summary["epochs"]},
        "train_seconds": summary["train_seconds"],
    }


def run_peer(
    rows: Rows, peer: str, seed: int, python: str | Exception, scratch: Path
) -> dict[str, Any]:
    """Results of a peer.

    Raises:
        RuntimeError: it failed or is not installed.
    """
    if isinstance(python, Exception):
        raise python
    command = [PEER_PROGRAM, peer, rows.log.name, rows.file, "--parts", rows.parts_file]
    said = run_program([*command, "--seed", seed, "--scratch", scratch], python=python)
    return json.loads(said.splitlines()[-1])


def environment(folder: Path, peers: list[str]) -> dict[str, str | Exception]:
    """Interpreter of each peer; installs missing packages into a folder.

    The environment also sees the project's packages, such as torch.

    Args:
        folder: of the environment; kept.
        peers: names of the peers.

    Returns:
        The interpreter, or pip's error.
    """
    pythons: dict[str, str | Exception] = {peer: sys.executable for peer in peers}
    python = folder / "bin/python"
    for peer in peers:
        if peer not in PACKAGES:
            continue
        try:
            if not python.exists():
                _run(sys.executable, "-m", "venv", folder)
                here = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
                version = f"python{sys.version_info.major}.{sys.version_info.minor}"
                link = folder / "lib" / version / "site-packages/project.pth"
                link.write_text("\n".join(sorted(here)) + "\n")
            if subprocess.run([python, "-c", f"import {peer}"], capture_output=True).returncode:
                print(f"installing {PACKAGES[peer]} into {folder}", flush=True)
                _run(python, "-m", "pip", "install", "--quiet", PACKAGES[peer])
            pythons[peer] = str(python)
        except RuntimeError as failure:
            pythons[peer] = failure
    return pythons


def _run(*command: str | Path) -> None:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise RuntimeError(f"not installed: {said[-1] if said else done.returncode}")


def summarize(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over seeds and draws, in the order of the logs, the subsets and the contenders.

    `above_lr` is the mean over the draws of a contender's AUC minus scikit-learn's logistic
    regression's on the same rows. The standard error belongs to this mean; with one draw, to the
    mean AUC over the seeds.
    """
    groups: dict[tuple[str, str], dict[str, dict[str, list[dict[str, Any]]]]] = {}
    for run in runs:
        of_subset = groups.setdefault((run["log"], run["rows"].split()[0]), {})
        of_contender = of_subset.setdefault(run["contender"], {})
        of_contender.setdefault(run["rows"], []).append(run)
    lines = []
    for (log, subset), by_contender in groups.items():
        bars = _aucs(by_contender.get(PEERS["lr"], {}))
        for contender, by_draw in by_contender.items():
            measured = [run for each in by_draw.values() for run in each]
            good = [run for run in measured if "failed" not in run]
            parts = measured[0]["parts"]
            line = {"log": log, "rows": subset, "parts": parts, "contender": contender}
            lines.append(line)
            if not good:
                line["failed"] = measured[-1]["failed"]
                continue
            line["runs"], line["draws"] = len(good), len(_aucs(by_draw))
            for name in ("auc", "logloss", "validation_auc", "seconds"):
                line[name] = statistics.mean(run[name] for run in good)
            above = [auc - bars[draw] for draw, auc in _aucs(by_draw).items() if draw in bars]
            if above:
                line["above_lr"] = statistics.mean(above)
            spread = above if len(above) > 1 else [run["auc"] for run in good]
            several = len(spread) > 1 and contender != PEERS["lr"]
            line["standard_error"] = (
                statistics.stdev(spread) / math.sqrt(len(spread)) if several else None
            )
    return lines


def _aucs(by_draw: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    aucs = {
        draw: [run["auc"] for run in runs if "failed" not in run] for draw, runs in by_draw.items()
    }
    return {draw: statistics.mean(each) for draw, each in aucs.items() if each}


def tables(found: dict[str, Any]) -> str:
    """The results as Markdown, a table for each log and subset."""
    lines, before = [], None
    for line in summarize(found["runs"]):
        rows = (line["log"], line["rows"])
        if rows != before:
            train, validation, test = line["parts"]
            draws = f", {line['draws']} draws" if line.get("draws", 1) > 1 else ""
            lines += [
                "",
                f"**{' '.join(rows)}**: {train:,} training, {validation:,} validation, {test:,} "
                f"test rows{draws}",
                "",
                "| contender | runs | test AUC | above LR | std. error | logloss | val. AUC "
                "| seconds |",
                "|---|---|---|---|---|---|---|---|",
            ]
            before = rows
        if "failed" in line:
            lines.append(f"| {line['contender']} | failed: {line['failed'][:60]} | | | | | | |")
            continue
        error = "" if line["standard_error"] is None else f"{line['standard_error']:.4f}"
        above = f"{line['above_lr']:+.4f}" if "above_lr" in line else ""
        lines.append(
            f"| {line['contender']:<26} | {line['runs']} | {line['auc']:.4f} | {above} | {error} "
            f"| {line['logloss']:.4f} | {line['validation_auc']:.4f} | {line['seconds']:.1f} |"
        )
    return "\n".join(lines).strip()


if __name__ == "__main__":
    main()
