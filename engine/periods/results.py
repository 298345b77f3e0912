"""What is told of a period: its line in `metrics.jsonl`, the shares of new ids, the picture."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

from stampede.data.learning.unknown_shares import compared
from stampede.data.prepared.manifest import read_manifest
from stampede.engine.console import readable_metric
from stampede.engine.inference.kept import INPUTS
from stampede.engine.periods.ledger import Period
from stampede.engine.periods.scored_before import SCORED
from stampede.engine.results.plots import draw_periods
from stampede.engine.results.run_folder import RunFolder, period_folder
from stampede.engine.training.evaluate import NEW_IDS
from stampede.engine.watching.heartbeat import PHASES, Heartbeat
from stampede.files import read_json, write_file

PICTURE = "periods.png"

# Parts of a period's time by stage of the heartbeat; all other stages are `other`.
_PARTS = {
    **dict.fromkeys(PHASES, "training"),
    "preparing data": "preparing",
    "loading": "loading",
    "evaluating": "scoring",
    "computing metrics": "scoring",
    "saving": "saving",
}

# With fewer rows, the AUC where ids are new says nothing.
_FEWEST_NEW = 100

# Metrics of a period's rows in its line.
_METRICS = ("auc", "logloss", "normalized_entropy", "calibration", "samples")


class Results:
    """The lines of the periods of a log; only rank 0 reads and writes them."""

    def __init__(self, folder: RunFolder, title: str) -> None:
        self._folder, self._title = folder, title

    def run_of(self, number: int) -> Path:
        """The run folder of a period."""
        return self._folder.path / period_folder(number)

    def lines(self) -> list[dict[str, Any]]:
        """The lines of the periods that have ended."""
        return [line for line in self._folder.lines() if line["kind"] == "period"]

    def has(self, period: Period) -> bool:
        """Whether a period has its line."""
        return period.number in [line["period"] for line in self.lines()]

    def tell(self, period: Period, again: list[Period], seconds: Mapping[str, float]) -> None:
        """Log and print the line of a period that has ended.

        Args:
            again: the earlier files that it was trained on.
            seconds: that it took, by part.
        """
        summary = read_json(self.run_of(period.number) / "summary.json")
        numbers = [one.number for one in again]
        others = sum(line["rows"] for line in self.lines() if line["period"] in numbers)
        scored = summary["last"]["test"]
        goals = {
            goal: _metrics(of_goal, period) for goal, of_goal in scored.get("goals", {}).items()
        }
        line = {
            "kind": "period",
            "period": period.number,
            "step": summary["steps"],
            "file": period.file,
            "rows": summary["rows"]["train"] - others,
            "ids": summary["ids"],
            **_metrics(scored, period),
            **({"goals": goals} if goals else {}),
            "train_seconds": summary["train_seconds"],
            "seconds": sum(seconds.values()),
            "part_seconds": dict(seconds),
            "peak_memory_bytes": summary["peak_memory_bytes"],
        }
        self._folder.log(line)
        print(_shown(line), flush=True)
        if period.number > 1:
            for goal, of_goal in goals.items():
                print(f"  of {goal}: {_scores(of_goal)}", flush=True)
        self._tell_unknown(period)

    def draw(self) -> None:
        """Draw the picture of all periods, if there is one."""
        if lines := self.lines():
            with self._folder.writing():
                write_file(self._folder.path / PICTURE, draw_periods(lines, self._title))

    def _tell_unknown(self, period: Period) -> None:
        """Print the shares of missing and new ids of a period beside those of the one before."""
        if period.number == 1:
            return
        found = self._source(period.number).get("unknown_ids", {})
        # All ids of the first period are new.
        source = {} if period.number == 2 else self._source(period.number - 1)
        told = compared(found.get("train", {}), source, "the period before")
        for line in told.lines.items():
            print("  " + ": ".join(line), flush=True)
        for sentence in told.warnings:
            print(f"warning: {period.file}: {sentence}", file=sys.stderr, flush=True)

    def _source(self, number: int) -> Mapping[str, Any]:
        """What is known of a period's file as the model before saw it."""
        run = self.run_of(number)
        if (run / SCORED).exists():
            return read_json(run / SCORED)
        return read_manifest(run / INPUTS).source


def _metrics(found: Mapping[str, Any], period: Period) -> dict[str, Any]:
    """All ids of the first period are new: its scores say nothing, even after a warm start."""
    names = [prefix + name for prefix in ("", NEW_IDS) for name in _METRICS]
    return {name: None if period.number == 1 else found[name] for name in names if name in found}


def _shown(line: dict[str, Any]) -> str:
    """A period's line, at most 100 columns if its file's name is short."""
    scores = "not scored: the first" if line["period"] == 1 else _scores(line)
    name = Path(line["file"]).name
    return f"period {line['period']:>3}  {name}  {line['rows']:>9,} rows  {scores}"


def _scores(found: Mapping[str, Any]) -> str:
    """The metrics of a period's rows, or of one goal of theirs."""
    if found.get("samples") == 0:
        return "no labels"
    told = f"AUC {readable_metric(found['auc'])} logloss {found['logloss']:.4f}"
    if (rows := found.get(f"{NEW_IDS}samples") or 0) >= _FEWEST_NEW:
        new = readable_metric(found[f"{NEW_IDS}auc"])
        told += f", AUC {new} in {rows:,} rows where ids are new"
    return told


@contextmanager
def timed(heartbeat: Heartbeat) -> Iterator[Mapping[str, float]]:
    """Yield the seconds of a period by part, filled in when the context ends."""
    seconds: dict[str, float] = defaultdict(float)
    part, since = "other", perf_counter()

    def begin(stage: str) -> None:
        nonlocal part, since
        now = perf_counter()
        seconds[part] += now - since
        part, since = _PARTS.get(stage, "other"), now

    with heartbeat.listening(begin):
        yield seconds
        begin("")
