"""Runs trials that are not done yet, and remembers those that failed."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stampede.engine.config import Config, to_yaml
from stampede.engine.errors import RunFolderError
from stampede.engine.exit_status import INTERRUPTED
from stampede.engine.run_folder import RunFolder, to_json, write_whole
from stampede.engine.sweeps.measured import is_of, measured
from stampede.engine.sweeps.points import Trial
from stampede.engine.sweeps.process import Start
from stampede.engine.sweeps.sweep import Sweep


@dataclass(frozen=True)
class Outcome:
    """What became of a trial.

    Attributes:
        trial: which one.
        folder: of its run.
        metrics: of the test part at the best epoch, and of the run; empty where it failed.
        selected: metrics of the part that chose the best epoch.
        selected_on: that part; empty where it failed.
        message: why it failed; empty where it did not.
    """

    trial: Trial
    folder: Path
    metrics: dict[str, Any]
    selected: dict[str, Any]
    selected_on: str = ""
    message: str = ""


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
        self._failures_file = sweep.folder / "failures.json"
        self._failures: dict[str, dict[str, str]] = {}
        if self._failures_file.exists() and not retry_failed:
            self._failures = json.loads(self._failures_file.read_text(encoding="utf-8"))

    def known(self, trial: Trial) -> Outcome | None:
        """What became of a trial; None where it is still to be run, or to be continued.

        Raises:
            RunFolderError: its run folder is of another configuration.
        """
        config, folder = self._sweep.config_of(trial), self._folder(trial)
        failure = self._failures.get(trial.name)
        if failure is not None and failure["config"] == _digest(config):
            return Outcome(trial, folder.path, {}, {}, message=failure["message"])
        if not folder.config_file.exists():
            return None
        if not is_of(config, folder):
            raise RunFolderError(
                f"{folder.path} was made with another configuration than this sweep's now; write "
                "another --out, or delete it to train it anew"
            )
        if not (folder.path / "summary.json").exists():
            return None
        found = measured(folder)
        return Outcome(trial, folder.path, found.test, found.selected, found.selected_on)

    def run(self, trial: Trial) -> Outcome:
        """Run a trial to its end, or say what became of it before.

        Raises:
            KeyboardInterrupt: the trial was interrupted.
        """
        known = self.known(trial)
        if known is not None:
            return known
        folder = self._folder(trial)
        self._sweep.runs.mkdir(parents=True, exist_ok=True)
        log = self._sweep.runs / f"{trial.name}.log"
        begins = log.stat().st_size if log.exists() else 0
        overrides = self._sweep.overrides_of(trial)
        status = self._start([str(self._sweep.config), *overrides], log)
        if status == INTERRUPTED:
            raise KeyboardInterrupt
        if status == 0 and not self._sweep.section.keep_checkpoints:
            shutil.rmtree(folder.checkpoints, ignore_errors=True)
        message = "" if status == 0 else _why(log.read_bytes()[begins:], status)
        if status == 0 and measured(folder).test["auc"] is None:
            message = "the AUC is undefined, a part has one class only"
        self._remember(trial, message)
        return self.known(trial)

    def _remember(self, trial: Trial, message: str) -> None:
        self._failures.pop(trial.name, None)
        if message:
            digest = _digest(self._sweep.config_of(trial))
            self._failures[trial.name] = {"message": message, "config": digest}
        write_whole(self._failures_file, to_json(self._failures, indent=1) + "\n")

    def _folder(self, trial: Trial) -> RunFolder:
        return RunFolder(self._sweep.runs / trial.name)


def _digest(config: Config) -> str:
    return hashlib.sha256(to_yaml(config).encode()).hexdigest()[:16]


def _why(said: bytes, status: int) -> str:
    """The sentence of a failed run, or its last words."""
    lines = [line.strip() for line in said.decode(errors="replace").splitlines() if line.strip()]
    errors = [number for number, line in enumerate(lines) if line.startswith("error")]
    if errors:
        # A sentence may go on in the lines that follow; torchrun adds its own far below.
        return " ".join(lines[errors[-1] : errors[-1] + 3]).removeprefix("error: ")[:300]
    killed = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
    return f"{killed}: {lines[-1][:250]}" if lines else killed
