"""Reads run folders, without data or model, and groups runs."""

from __future__ import annotations

import itertools
import json
import os.path
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from stampede import RunFolderError, open_run
from stampede.settings import SettingsError, printable, read_yaml

# Files of a run folder, and of a folder of `stampede incremental` or `stampede sweep`.
_CONFIG, _SUMMARY_FILE, _PERIODS, _TRIALS = (
    "config.yaml", "summary.json", "periods.json", "trials",
)  # fmt: skip

# Metrics of one number, and how they are shown; parts that have them.
METRICS = {
    "auc": "AUC", "logloss": "logloss", "pr_auc": "PR-AUC",
    "normalized_entropy": "norm. entropy", "calibration": "calibration", "gauc": "GAUC",
}  # fmt: skip
PARTS = ("validation", "test")

_HINT = "write a run folder such as runs/quickstart, or a folder of run folders"

# Keys that only concern how a run is started, logged or saved, not its result.
_NOT_COMPARED = (
    "run.name", "run.dir", "run.overwrite", "run.hang_seconds", "run.slow_hang_seconds",
    "checkpoint.", "train.log_every", "evaluate.compare_with_",
    "train.timing_every", "train.profile.",
)  # fmt: skip

# Keys that decide which rows a run is tested on.
_OF_THE_ROWS = (
    "data.kind", "data.path", "data.split", "data.test_", "data.validation_path", "data.seed",
    "data.scale", "data.rows", "data.zipf",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class RunRecord:
    """What a run wrote.

    Attributes:
        label: short name, different for each run of a report.
        config: values of `config.yaml` by dotted key.
        lines: of `metrics.jsonl`, with the number of samples `trained` on until then, counting an
            epoch's last batch as full.
        summary: `summary.json`; empty if the run has not ended or was continued since.
        periods: lines on the periods of a log that comes in files; all else is from the newest one.
    """

    path: Path
    label: str
    config: dict[str, Any]
    lines: list[dict[str, Any]]
    summary: dict[str, Any] = field(default_factory=dict)
    periods: list[dict[str, Any]] = field(default_factory=list)

    @property
    def batch_size(self) -> int:
        """Samples of a global batch."""
        return self.config["train.batch_size"]

    @property
    def compared(self) -> dict[str, Any]:
        """The settings in which runs are compared."""
        return {k: v for k, v in self.config.items() if not k.startswith(_NOT_COMPARED)}

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """The lines of a kind."""
        return [line for line in self.lines if line["kind"] == kind]

    @property
    def goals(self) -> list[str]:
        """Names of several goals; none of a single label."""
        return list(next((line["goals"] for line in self.lines if line.get("goals")), ()))

    def evaluations(self, part: str, goal: str = "") -> list[dict[str, Any]]:
        """Evaluations of a part, in order; with the metrics of one of several goals."""
        found = [line for line in self.of_kind("evaluation") if line["part"] == part]
        if not goal:
            return found
        return [{**line, **(line.get("goals") or {}).get(goal, {})} for line in found]

    def metric(self, part: str, name: str, when: str = "selected", goal: str = "") -> Any:
        """A metric of a part after the `selected` or the `last` epoch; None if unknown."""
        if not self.summary:
            return None
        found = self.summary if part == "test" else self.summary.get(part)
        if when == "last":
            found = self.summary["last"].get(part)
        if goal:
            found = ((found or {}).get("goals") or {}).get(goal)
        return (found or {}).get(name)

    def state(self) -> str | None:
        """A sentence on a run that has not ended; None if it has."""
        if self.summary:
            return None
        if not self.lines:
            return "has recorded nothing yet (no line in metrics.jsonl)"
        stops, last = self.of_kind("stopped"), self.lines[-1]["step"]
        if stops and stops[-1]["step"] >= last:
            return f"stopped at step {last}: {stops[-1]['reason']}"
        lacks = "no summary.json"
        if (self.path / _SUMMARY_FILE).is_file():
            lacks = "it was continued after summary.json was written"
        return f"is not finished ({lacks}); results are shown up to step {last:,}"


@dataclass(frozen=True, eq=False)
class Setting:
    """Runs that differ only in `run.seed`; the label of one, or the beginning that all share."""

    label: str
    runs: tuple[RunRecord, ...]

    @property
    def goals(self) -> list[str]:
        """See `RunRecord.goals`."""
        return self.runs[0].goals

    def metric(self, part: str, name: str, when: str = "selected", goal: str = "") -> list[float]:
        """A metric of each run that has it; see `RunRecord.metric`."""
        found = [run.metric(part, name, when, goal) for run in self.runs]
        return [value for value in found if value is not None]

    def figures(self, key: str) -> list[Any]:
        """A value of the summary of each run that has it."""
        return [run.summary[key] for run in self.runs if run.summary.get(key) is not None]


def settings_of(runs: Sequence[RunRecord]) -> list[Setting]:
    """Group runs that differ only in the seed, in their order."""
    found, met = defaultdict(list), Counter()
    for run in runs:
        compared = {k: readable(v) for k, v in run.compared.items()}
        seed = compared.pop("run.seed", "")
        key = tuple(sorted(compared.items()))
        # A repeated seed starts another setting instead of counting as another seed.
        found[key, met[key, seed]].append(run)
        met[key, seed] += 1
    labels: set[str] = set()
    settings = []
    for members in found.values():
        label = members[0].label
        if len(members) > 1:
            # "deepfm-1024-seed1" and "deepfm-1024-seed2" begin with the same name.
            common = os.path.commonprefix([run.label for run in members])
            name = re.sub(r"[-_. ]*(seed)?[-_. ]*$", "", common) or label
            label = f"{label if name in labels else name} ({len(members)} seeds)"
        labels.add(label)
        settings.append(Setting(label, tuple(members)))
    return settings


def by_data(runs: Sequence[RunRecord]) -> dict[str, list[RunRecord]]:
    """Group runs by the rows they are tested on; the key describes these rows."""
    groups = defaultdict(list)
    for run in runs:
        rows = {k: readable(v) for k, v in run.config.items() if k.startswith(_OF_THE_ROWS)}
        groups[tuple(sorted(rows.items()))].append(run)
    different, named = differing_keys(runs), {}
    for rows, members in groups.items():
        of = dict(rows)
        said = [of.pop("data.kind", "")]
        said += [f"{key.removeprefix('data.')} {value}" for key, value in of.items()
                 if key in different and value not in ("null", "")]  # fmt: skip
        named[", ".join(said)] = members
    return named


def differing_keys(runs: Sequence[RunRecord]) -> list[str]:
    """Dotted keys whose values differ between runs, in the order of the configuration."""
    keys = dict.fromkeys(key for run in runs for key in run.compared)
    return [key for key in keys if len({readable(run.compared.get(key, "-")) for run in runs}) > 1]


def readable(value: Any) -> str:
    """A value of a configuration as one line of YAML."""
    if isinstance(value, list):
        return "[" + ", ".join(map(readable, value)) + "]"
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def open_runs(paths: Sequence[Path]) -> list[RunRecord]:
    """Read runs, each once: run folders, folders of run folders, or sweep folders.

    Runs that cannot be read are told and left out.

    Raises:
        RunFolderError: there is no run, or none can be read.
        SettingsError: the only `config.yaml` cannot be read.
    """
    folders = list(dict.fromkeys(run.resolve() for path in paths for run in _run_folders(path)))
    # The shortest path endings that tell the folders apart.
    for parts in itertools.count(1):
        labels = ["/".join(folder.parts[-parts:]) for folder in folders]
        # Matplotlib hides labels with a leading underscore from legends.
        labels = [f"./{label}" if label.startswith("_") else label for label in labels]
        if len(set(labels)) == len(labels):
            break
    found: list[RunRecord] = []
    failures: list[Exception] = []
    for path, label in zip(folders, labels, strict=True):
        try:
            found.append(_read(path, label))
        except (RunFolderError, SettingsError) as failure:
            failures.append(failure)
    if not found:
        raise failures[0]
    for failure in failures:
        print(f"left out: {printable(str(failure))}", file=sys.stderr)
    return found


def baseline_of(runs: Sequence[RunRecord], asked: str) -> RunRecord:
    """Find the run that a user names by its label, its folder or the folder's name.

    Raises:
        RunFolderError: no run or several runs have this name.
    """
    folder = Path(asked).resolve()
    found = [run for run in runs if asked in (run.label, run.path.name) or run.path == folder]
    if len(found) != 1:
        labels = ", ".join(run.label for run in runs)
        raise RunFolderError(
            f"--baseline: found {asked!r}, which names {len(found) or 'none'} of the runs; write "
            f"one of {labels}"
        )
    return found[0]


def flat_keys(values: Any, prefix: str = "") -> dict[str, Any]:
    """Values of nested sections by dotted key."""
    if not isinstance(values, dict) or (prefix and not values):
        return {prefix: values}
    found = {}
    for key, value in values.items():
        found |= flat_keys(value, f"{prefix}.{key}" if prefix else key)
    return found


def _run_folders(path: Path) -> list[Path]:
    if not path.is_dir():
        raise RunFolderError(f"{path}: no such run folder; {_HINT}")
    if (path / _CONFIG).is_file():
        return [path]
    # Hidden folders are being written or deleted.
    found = sorted(
        child
        for child in path.iterdir()
        if not child.name.startswith(".") and (child / _CONFIG).is_file()
    )
    if not found and (path / _TRIALS).is_dir():
        return _run_folders(path / _TRIALS)
    if not found:
        raise RunFolderError(
            f"{path}: neither it nor a folder in it has a config.yaml, so it has no run; {_HINT}"
        )
    return found


def _read(path: Path, label: str) -> RunRecord:
    if (path / _PERIODS).is_file():
        periods = [line for line in open_run(path).lines if line["kind"] == "period"]
        if not periods:
            raise RunFolderError(f"{path}: no period has ended yet, so there is nothing to show")
        newest = _read(path / f"period_{periods[-1]['period']:04d}", label)
        return replace(newest, periods=periods)
    config = flat_keys(read_yaml(path / _CONFIG, _HINT))
    batch_size = config.get("train.batch_size")
    if not isinstance(batch_size, int):
        raise RunFolderError(
            f"{path / _CONFIG}: train.batch_size is missing or not a whole number, so no run "
            f"wrote this file; {_HINT}"
        )
    run = open_run(path)
    lines, summary = run.lines, {}
    for line in lines:
        line["trained"] = line["step"] * batch_size
    if (path / _SUMMARY_FILE).is_file():
        summary = run.summary
    if summary and lines and lines[-1]["step"] > summary["steps"]:
        summary = {}
    return RunRecord(path, label, config, lines, summary)
