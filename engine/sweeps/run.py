"""A whole sweep: trials, tables, pictures."""

from __future__ import annotations

import fcntl
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tqdm.auto import tqdm

from stampede.engine.console import progress_bar, readable_metric
from stampede.engine.datasets import check_files
from stampede.engine.errors import RunFolderError, TrainingStoppedError
from stampede.engine.summary import selected_metrics
from stampede.engine.sweeps.files import writing
from stampede.engine.sweeps.journal import NAME as JOURNAL
from stampede.engine.sweeps.pictures import draw
from stampede.engine.sweeps.points import Point
from stampede.engine.sweeps.process import Start
from stampede.engine.sweeps.results import Result, results
from stampede.engine.sweeps.runner import Outcome, Runner
from stampede.engine.sweeps.study import check_optuna, run_study
from stampede.engine.sweeps.sweep import Sweep
from stampede.engine.sweeps.table import to_csv, to_markdown
from stampede.files import write_file


def run_sweep(sweep: Sweep, start: Start, retry_failed: bool = False) -> list[Path]:
    """Run all trials that are not done yet, then write tables and pictures.

    Returns:
        The files written.

    Raises:
        SettingsError, DataError, RunFolderError: the user's to mend.
        TrainingStoppedError: every trial failed.
    """
    _check(sweep)
    with _only_one(sweep.folder):
        runner = Runner(sweep, start, retry_failed)
        if sweep.study is None:
            for trial in sweep.trials(sweep.points):
                runner.known(trial)
        outcomes = _run_all(sweep, runner)
        found = results(sweep, outcomes)
        files = [sweep.folder / "results.csv", sweep.folder / "results.md"]
        for file, text in zip(
            files, (to_csv(sweep, found), to_markdown(sweep, found)), strict=True
        ):
            with writing(file):
                write_file(file, text)
        files += _pictures(sweep, found)
    if all(outcome.message for outcome in outcomes):
        again = "" if sweep.study else "; --retry-failed runs them again"
        raise TrainingStoppedError(
            f"all {len(outcomes)} trials failed, the first with: {outcomes[0].message}; see "
            f"{sweep.runs}/*.log{again}"
        )
    return files


def _pictures(sweep: Sweep, found: Sequence[Result]) -> list[Path]:
    try:
        return draw(sweep, found, sweep.folder)
    except Exception as failure:
        # Days of training end here: whatever matplotlib cannot draw, the tables are written.
        said = str(failure).strip() or type(failure).__name__
        print(f"no pictures, drawing failed: {said.splitlines()[0]}", file=sys.stderr)
        return []


def _check(sweep: Sweep) -> None:
    if sweep.study is not None:
        check_optuna()
    # Those of a study differ in values that Optuna has yet to choose.
    for point in sweep.points or [Point({}, (), name="study")]:
        check_files(sweep.config_of(point.trial(sweep.seeds[0])))


def _run_all(sweep: Sweep, runner: Runner) -> list[Outcome]:
    count = len(sweep.points) if sweep.study is None else sweep.study.trials
    bar = progress_bar(count * len(sweep.seeds), 0, True, "sweep", "trials")
    shown: set[str] = set()

    def run_point(point: Point) -> list[Outcome]:
        outcomes = []
        for trial in sweep.trials([point]):
            outcome = runner.known(trial)
            if outcome is None:
                tqdm.write(f"{trial.name} ...")
                outcome = runner.run(trial)
                tqdm.write(f"{trial.name}: {_said(outcome)}")
            if trial.name not in shown:
                shown.add(trial.name)
                bar.update()
            outcomes.append(outcome)
        return outcomes

    with bar:
        if sweep.study is not None:
            with writing(sweep.folder / JOURNAL):
                return run_study(sweep, run_point)
        return [outcome for point in sweep.points for outcome in run_point(point)]


def _said(outcome: Outcome) -> str:
    if outcome.message:
        return f"failed: {outcome.message}"
    aucs = ", ".join(
        f"{part} AUC {readable_metric(metrics['auc'])}"
        for part, metrics in selected_metrics(outcome.summary).items()
    )
    epoch = f"epoch {outcome.summary['best_epoch']}, chosen on the {outcome.selected_on} part"
    return f"{aucs} in {epoch}; trained {outcome.summary['train_seconds']:.0f} s"


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Make the folder and keep other sweeps out of it; the system frees it at any end."""
    with ExitStack() as held:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            lock = held.enter_context((folder / ".lock").open("w"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise RunFolderError(
                    f"{folder} is in use by another sweep; end it first, or write another --out"
                ) from None
        yield


def shown(sweep: Sweep, files: Sequence[Path]) -> str:
    """The table, where the results are, and how to see more of them."""
    table = (sweep.folder / "results.md").read_text(encoding="utf-8")
    report = f"stampede report {shlex.quote(str(sweep.folder))}"
    return f"{table}\nresults: {', '.join(map(str, files))}\ncurves of the trials: {report}"
