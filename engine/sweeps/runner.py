"""Runs trials that are not done yet, and remembers those that failed."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from stampede.engine.errors import INTERRUPTED, RunFolderError
from stampede.engine.network_copy import check_executed
from stampede.engine.run_folder import RunFolder
from stampede.engine.summary import selected_metrics
from stampede.engine.sweeps.failures import Failures, why
from stampede.engine.sweeps.files import writing
from stampede.engine.sweeps.measured import difference, ended
from stampede.engine.sweeps.points import Trial
from stampede.engine.sweeps.process import Start
from stampede.engine.sweeps.sections import shown_as
from stampede.engine.sweeps.sweep import Sweep
from stampede.settings import SettingsError


@dataclass(frozen=True)
class Outcome:
    """What became of a trial.

    Attributes:
        trial: which one.
        folder: of its run.
        summary: its `summary.json`; empty where it failed.
        message: why it failed; empty where it did not.
    """

    trial: Trial
    folder: Path
    summary: dict[str, Any] = field(default_factory=dict)
    message: str = ""

    @property
    def selected_on(self) -> str:
        """The part that chose the best epoch; empty where the trial failed."""
        return self.summary.get("selected_on", "")

    def sought(self, metric: str) -> float | None:
        """A metric of that part in that epoch."""
        return selected_metrics(self.summary)[self.selected_on].get(metric)


class Runner:
    """Runs the trials of a sweep, each in processes of its own.

    Args:
        sweep: what they belong to.
        start: runs a process.
        retry_failed: whether trials that failed before are run again.
    """

    def __init__(self, sweep: Sweep, start: Start, retry_failed: bool = False) -> None:
        self._sweep = sweep
        self._start = start
        self._failures = Failures(sweep.folder / "failures.json")
        # Each is forgotten when its turn comes, so that a kill loses none.
        self._retried = self._failures.names() if retry_failed else set()

    def known(self, trial: Trial) -> Outcome | None:
        """What became of a trial; None where it is still to be run, or to be continued.

        Raises:
            RunFolderError: its run folder is of another configuration or network, or damaged.
        """
        folder = self._folder(trial)
        try:
            config = self._sweep.config_of(trial)
        except SettingsError as mistake:
            # A study may choose values that do not go together.
            return _failed(trial, folder, " ".join(str(mistake).split()))
        message = self._failures.message(trial.name, config)
        if message and trial.name not in self._retried:
            return _failed(trial, folder, message)
        if not folder.config_file.exists():
            return None
        differs = difference(config, folder)
        if differs:
            raise RunFolderError(
                f"{folder.path} was made with another configuration than this sweep's now "
                f"({differs}); write another --out, or delete it to train it anew"
            )
        check_executed(config, folder.path)
        if not folder.summary.exists():
            return None
        if not self._sweep.section.keep_checkpoints:
            shutil.rmtree(folder.checkpoints, ignore_errors=True)
        return self._judged(Outcome(trial, folder.path, ended(folder)))

    def run(self, trial: Trial) -> Outcome:
        """Run a trial to its end, or say what became of it before.

        Raises:
            RunFolderError: something cannot be written.
            KeyboardInterrupt: the trial was interrupted.
        """
        known = self.known(trial)
        if known is not None:
            return known
        self._retried.discard(trial.name)
        self._failures.drop(trial.name)
        log = self._sweep.runs / f"{trial.name}.log"
        with writing(log):
            self._sweep.runs.mkdir(parents=True, exist_ok=True)
            begins = log.stat().st_size if log.exists() else 0
            status = self._start([str(self._sweep.config), *self._sweep.overrides_of(trial)], log)
        if status == INTERRUPTED:
            raise KeyboardInterrupt
        outcome = None if status else self.known(trial)
        if outcome is None:
            message = why(log.read_bytes()[begins:], status)
            if self._sweep.study is None:
                # A sweep resumes by itself.
                message = message.replace("checkpoint.resume=auto", "--retry-failed")
            self._failures.add(trial.name, self._sweep.config_of(trial), message)
            outcome = _failed(trial, self._folder(trial), message)
        return outcome

    def _judged(self, found: Outcome) -> Outcome:
        study = self._sweep.study
        needed = [("test", "auc", found.summary["auc"])]
        if study is not None:
            needed.append((found.selected_on, study.metric, found.sought(study.metric)))
        for part, name, value in needed:
            if value is None:
                takes = "clicks and others" + (" in a group" if name == "gauc" else "")
                message = f"the {shown_as(name)} of the {part} part is undefined; it takes {takes}"
                return replace(found, summary={}, message=message)
        return found

    def _folder(self, trial: Trial) -> RunFolder:
        return RunFolder(self._sweep.runs / trial.name)


def _failed(trial: Trial, folder: RunFolder, message: str) -> Outcome:
    return Outcome(trial, folder.path, message=message)
