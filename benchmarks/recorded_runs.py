"""Compares weights and metrics of short runs with recorded ones, bit for bit.

python benchmarks/recorded_runs.py            # compare with results/recorded_runs.json
python benchmarks/recorded_runs.py --record   # write that file, on the commit to compare with

Bits depend on the processor's instructions and on torch: record and compare on one machine.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from machine import describe_machine
from report import ROOT

from stampede.engine.inference.trained import open_trained, whole_model

RECORD = ROOT / "benchmarks/results/recorded_runs.json"
SAME_MACHINE = ("cpu", "bf16_instructions", "torch", "torchrec")
# Endings of metrics that differ between equal runs.
TIMED = ("_per_second", "_seconds", "_bytes", "time")

SMALL = ["train.log_every=4", "train.timing_every=0", "evaluate.batch_size=512"]
RUNS = {
    "quickstart": [
        str(ROOT / "configs/quickstart.yaml"), *SMALL, "data.rows=20000", "data.test_rows=2000",
        "data.scale=0.01", "train.batch_size=1024", "evaluate.every=8", "train.epochs=2",
    ],
    # A log with bags, numbers and sample weights; two column shards are clipped together.
    "bags": [
        str(ROOT / "configs/table.yaml"), *SMALL, "data.path=log.csv",
        "data.schema_file=schema.yaml", "data.cache=cache", "data.validation_fraction=0.2",
        "model.hidden=[16,16]", "model.init_std=0.01", "train.batch_size=128", "train.epochs=3",
        "optim.embedding.optimizer=rowwise_adagrad", "sharding.plan=column_wise",
        'evaluate.metrics=["pr_auc","calibration"]',
    ],
    "dcnv2": [
        str(ROOT / "configs/quickstart.yaml"), *SMALL, "data.rows=8000", "data.test_rows=1000",
        "data.scale=0.001", "train.batch_size=512", "model.hidden=[32,32]", "model.name=dcnv2",
        "sharding.plan=column_wise",
    ],
}  # fmt: skip


def result_of(name: str, ranks: int, folder: Path) -> dict[str, Any]:
    """SHA-256 of the weights of a run, and its lines of metrics without times."""
    place = ["run.dir=runs", f"run.name={name}_{ranks}", "run.device=cpu"]
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    command = [*(torchrun if ranks > 1 else []), str(ROOT / "launch.py"), *RUNS[name], *place]
    done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        said = f"failed with status {done.returncode}:\n{done.stderr[-3000:]}"
        raise RuntimeError(f"{name} on {ranks} ranks {said}")
    run = folder / "runs" / f"{name}_{ranks}"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    untimed = [{k: v for k, v in line.items() if not k.endswith(TIMED)} for line in lines]
    return {"weights": weights_of(run), "metrics": [json.dumps(line) for line in untimed]}


def weights_of(run: Path) -> str:
    """SHA-256 of all tables and layers of the newest checkpoint."""
    digest = hashlib.sha256()
    model = whole_model(open_trained(run, "newest"), torch.device("cpu"))
    for name, value in sorted(model.state_dict().items()):
        digest.update(name.encode() + value.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def differences(recorded: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Differences between a run and its record, in words."""
    said = [] if recorded["weights"] == found["weights"] else ["the weights differ"]
    if len(recorded["metrics"]) != len(found["metrics"]):
        said.append(f"{len(found['metrics'])} lines, not {len(recorded['metrics'])}")
    pairs = zip(recorded["metrics"], found["metrics"], strict=False)
    return said + [f"{old} is now {new}" for old, new in pairs if old != new]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", action="store_true", help="write the record")
    parser.add_argument("runs", nargs="*", default=list(RUNS), help="names; default: all")
    arguments = parser.parse_args()
    machine, found, status = describe_machine(), {}, 0
    recorded = {} if arguments.record else json.loads(RECORD.read_text())
    for key in () if arguments.record else SAME_MACHINE:
        if recorded["machine"][key] != machine[key]:
            print(f"recorded with {key} {recorded['machine'][key]}, this is {machine[key]}")
    sys.path.insert(0, str(ROOT / "tests"))
    from support.movies import MOVIES, movies, write_movies

    with tempfile.TemporaryDirectory() as folder:
        write_movies(Path(folder) / "log.csv", movies(3000))
        (Path(folder) / "schema.yaml").write_text(MOVIES)
        for name, ranks in itertools.product(arguments.runs, (1, 2)):
            key = f"{name}, {ranks} rank(s)"
            found[key] = result_of(name, ranks, Path(folder))
            if not arguments.record:
                said = differences(recorded["runs"][key], found[key])
                print(
                    f"{key}: {'the same bits' if not said else ''}", *said, sep="\n  ", flush=True
                )
                status |= bool(said)
    if arguments.record:
        RECORD.write_text(json.dumps({"machine": machine, "runs": found}, indent=1) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
