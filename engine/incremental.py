"""Train on a log that comes in files: `stampede incremental CONFIG.yaml data.path='logs/*.gz'`.

Each file is a period: it is scored with the model so far, then trained on once. Started again, the
command takes the files that are new.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, ValidationError

from stampede.data.errors import DataError
from stampede.engine.errors import InterruptedRunError, RunFolderError, exit_status
from stampede.engine.start_up import keep_freed_memory, launched_world_size, quiet_libraries
from stampede.settings import Section, SettingsError

# What takes seconds to import is imported where it is needed.
if TYPE_CHECKING:
    from stampede.engine.config import Config
    from stampede.engine.processes import Processes
    from stampede.engine.run_folder import RunFolder

OnBadFile = Literal["error", "skip"]

LEDGER, PICTURE = "periods.json", "periods.png"

# A file that another program writes is taken when its size has not changed for so long.
_AT_REST_SECONDS, _POLL_SECONDS = 5.0, 1.0

# What a period's line has of the scores of its rows.
_METRICS = ("auc", "logloss", "normalized_entropy", "calibration", "samples")


class Period(Section):
    """A file of the log, or one that was left out.

    Attributes:
        number: from 1; 0 of a file that was left out.
        file: its path, as it was found.
        bytes: its size.
        reason: why it was left out; else empty.
    """

    number: int = Field(ge=0)
    file: str
    bytes: int = Field(ge=0)
    reason: str = ""

    @property
    def name(self) -> str:
        """Of its run folder, in that of the whole."""
        return f"period_{self.number:04d}"


class Ledger(Section):
    """Which files were taken, in order."""

    periods: list[Period] = Field(default_factory=list)

    @property
    def trained(self) -> list[Period]:
        """Without those left out."""
        return [period for period in self.periods if period.number]


def train_incrementally(
    path: Path, overrides: Sequence[str], on_bad_file: OnBadFile = "error", follow: bool = False
) -> None:
    """Score each new file of a log with the model so far, then train on it.

    Args:
        path: YAML file; `data.path` names the files of the log.
        overrides: `section.key=value`.
        on_bad_file: a file that cannot be read, or that comes before one that was trained on:
            error, or skip: noted and left out.
        follow: whether to wait for more files, until SIGTERM or SIGINT.

    Raises:
        SettingsError, DataError, RunFolderError: the user's to mend.
        TrainingStoppedError: training cannot go on.
        InterruptedRunError: a signal asked to stop.
    """
    from stampede.engine.config.data import RawSection
    from stampede.engine.config.load import load_config
    from stampede.engine.processes import processes
    from stampede.engine.run_folder import RunFolder

    whole = load_config(path, [*overrides, "checkpoint.resume=auto"], launched_world_size())
    if not isinstance(whole.data, RawSection):
        raise SettingsError(
            f"{path}: data.kind is {whole.data.kind!r}, which has no files that come one after the "
            "other; write criteo_kaggle, criteo_1tb, avazu or table"
        )
    folder = RunFolder(Path(whole.run.dir) / whole.run.name)
    with processes(whole.run.device) as here, folder:
        here.on_main(lambda: folder.reserve(whole))
        here.on_main(lambda: _begin(folder, whole))
        _Periods(path, overrides, whole, folder, here, on_bad_file).train(follow)


def _begin(folder: RunFolder, whole: Config) -> None:
    if folder.checkpoints.exists():
        raise RunFolderError(
            f"{folder.path} holds a run of `train`; choose another run.name for the periods"
        )
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.write_config(whole)


class _Periods:
    """The periods of a log; all ranks make the same calls."""

    def __init__(
        self,
        path: Path,
        overrides: Sequence[str],
        whole: Config,
        folder: RunFolder,
        here: Processes,
        on_bad_file: OnBadFile,
    ) -> None:
        self._path = path
        self._overrides = overrides
        self._whole = whole
        self._folder = folder
        self._here = here
        self._on_bad_file = on_bad_file
        self._ledger_file = folder.path / LEDGER
        # Sizes of new files, and since when they are so large.
        self._sizes: dict[Path, tuple[int, float]] = {}

    def train(self, follow: bool) -> None:
        from stampede.engine.stop import Agreement, StopSignals

        signals = StopSignals()
        agreement = Agreement(self._here, signals, 0)
        taken, told = 0, False
        while True:
            with signals.watched():
                period = self._here.on_main(lambda: self._next(follow))
                asked, _ = agreement.after(0)
                if asked:
                    name = signal.Signals(asked).name
                    raise InterruptedRunError(
                        f"stopped by {name} between two periods; the same command goes on", asked
                    )
                if period is None and follow:
                    if not told and self._here.is_main:
                        print(f"waiting for files: {self._whole.data.path}", flush=True)
                    told = True
                    time.sleep(_POLL_SECONDS)
                    continue
            if period is None:
                break
            told = False
            taken += self._train(period)
        if self._here.is_main:
            print(f"{taken} new periods; {self._folder.path / PICTURE} shows all")

    def _next(self, follow: bool) -> Period | None:
        """The period to train, noted in the ledger; None if there is no new file."""
        ledger = self._read()
        # It may have been killed in the middle, or before its line was written.
        if ledger.trained and not self._is_told(ledger.trained[-1]):
            return ledger.trained[-1]
        for file in self._new_files(ledger, follow):
            number = len(ledger.trained) + 1
            period = Period(number=number, file=str(file), bytes=file.stat().st_size)
            before = [Path(one.file) for one in ledger.trained]
            if before and _order(file) < _order(before[-1]):
                late = (
                    f"{file}: comes before {before[-1]}, which was trained on already; give it a "
                    "later name to train on it now, or leave it out with --on-bad-file skip"
                )
                if self._on_bad_file == "error":
                    raise DataError(late)
                self._leave_out(period, late)
                ledger = self._read()
                continue
            self._write(Ledger(periods=[*ledger.periods, period]))
            return period
        return None

    def _new_files(self, ledger: Ledger, follow: bool) -> list[Path]:
        """Files that are not in the ledger, in order, up to one that is still being written.

        Raises:
            DataError: there is no file, or one that was trained on has changed.
        """
        from stampede.data.raw.files import expand

        taken = {Path(one.file): one for one in ledger.periods}
        try:
            files = expand(self._whole.data.path)
        except DataError:
            if follow or taken:
                return []
            raise
        new = []
        for file in files:
            size = file.stat().st_size
            if file not in taken:
                if follow and not self._is_at_rest(file, size):
                    break
                new.append(file)
            elif taken[file].number and taken[file].bytes != size:
                raise DataError(
                    f"{file}: was trained on with {taken[file].bytes:,} bytes and has {size:,} "
                    "now; put new rows into a new file"
                )
        return new

    def _is_at_rest(self, file: Path, size: int) -> bool:
        before, since = self._sizes.get(file, (-1, 0.0))
        if before != size:
            self._sizes[file] = (size, time.monotonic())
            return False
        return time.monotonic() - since >= _AT_REST_SECONDS

    def _train(self, period: Period) -> int:
        """Train a period to its end; the number of periods trained, 0 or 1."""
        from stampede.engine.run import run_here

        config = self._config(period)
        run = Path(config.run.dir) / config.run.name
        if self._here.is_main:
            print(f"\nperiod {period.number}: {period.file}", flush=True)
        if not self._here.on_main(lambda: (run / "summary.json").exists()):
            try:
                run_here(config, self._here)
            except DataError as failure:
                # Of the file itself; a full disk is no fault of it.
                of_file = str(failure).startswith(f"{period.file}:")
                if self._on_bad_file == "error" or not of_file:
                    raise
                reason = str(failure)
                self._here.on_main(lambda: self._leave_out(period, reason))
                return 0
        self._here.on_main(lambda: self._finish(period, config))
        return 1

    def _config(self, period: Period) -> Config:
        from stampede.engine.config.load import load_config

        own = {
            "run.dir": str(self._folder.path),
            "run.name": period.name,
            "data.path": period.file,
            "data.split": "periods",
            "data.cache": str(self._folder.path / "cache"),
            "checkpoint.resume": "auto",
        }
        if period.number > 1:
            before = self._folder.path / f"period_{period.number - 1:04d}"
            own["data.period_before"] = str(before / "inputs")
            own["checkpoint.init_from"] = str(before)
            own["checkpoint.init_state"] = "all"
        given = [f"{key}={json.dumps(value)}" for key, value in own.items()]
        return load_config(self._path, [*self._overrides, *given], self._here.world_size)

    def _finish(self, period: Period, config: Config) -> None:
        """Note a period's result and delete what no later one needs; may be done again."""
        from stampede.engine.figures import draw_periods
        from stampede.files import delete_folder, write_file

        run = self._folder.path / period.name
        summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
        new_ids = {
            name: value for name, value in summary["last"]["test"].items() if "new_ids_" in name
        }
        # A model that has learned nothing yet has no score.
        if not self._is_told(period):
            self._folder.log(
                {
                    "kind": "period",
                    "period": period.number,
                    "step": summary["steps"],
                    "file": period.file,
                    "rows": summary["rows"]["train"],
                    "ids": summary["ids"],
                    **{name: summary[name] for name in _METRICS if name in summary},
                    **{n: v for n, v in new_ids.items() if n.removeprefix("new_ids_") in _METRICS},
                    "train_seconds": summary["train_seconds"],
                }
            )
        lines = [line for line in self._folder.lines() if line["kind"] == "period"]
        write_file(self._folder.path / PICTURE, draw_periods(lines, self._whole.run.name))
        shutil.rmtree(self._folder.path / "cache", ignore_errors=True)
        last = period.number - config.checkpoint.keep
        for older in (self._folder.path / f"period_{number:04d}" for number in range(1, last + 1)):
            for kept in (older / "checkpoints", older / "inputs"):
                if kept.exists():
                    delete_folder(kept)

    def _is_told(self, period: Period) -> bool:
        return any(
            line["kind"] == "period" and line["period"] == period.number
            for line in self._folder.lines()
        )

    def _leave_out(self, period: Period, reason: str) -> None:
        from stampede.files import delete_folder

        ledger = self._read()
        others = [one for one in ledger.periods if one.file != period.file]
        left_out = period.model_copy(update={"number": 0, "reason": reason})
        run = self._folder.path / period.name
        if run.exists():
            delete_folder(run)
        self._write(Ledger(periods=[*others, left_out]))
        step = max([0, *(line["step"] for line in self._folder.lines())])
        self._folder.log({"kind": "left_out", "step": step, "file": period.file, "reason": reason})
        print(f"left out: {reason}", file=sys.stderr, flush=True)

    def _read(self) -> Ledger:
        if not self._ledger_file.exists():
            return Ledger()
        try:
            return Ledger.model_validate_json(self._ledger_file.read_bytes())
        except (OSError, ValidationError) as failure:
            reason = str(failure).splitlines()[0]
            raise RunFolderError(
                f"{self._ledger_file}: damaged ({reason}); without it nobody knows which files "
                "were trained on. Begin anew with another run.name"
            ) from None

    def _write(self, ledger: Ledger) -> None:
        from stampede.files import write_file

        write_file(self._ledger_file, ledger.model_dump_json(indent=1) + "\n")


def _order(file: Path) -> Any:
    from stampede.data.raw.files import naturally

    return naturally(file)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status: 2 for a user's mistake."""
    # Both before torch is imported.
    quiet_libraries()
    keep_freed_memory()
    given = _parser().parse_args(arguments)
    return exit_status(
        lambda: train_incrementally(
            Path(given.config), given.overrides, given.on_bad_file, given.follow
        )
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stampede incremental",
        usage="stampede incremental CONFIG.yaml data.path='logs/*.gz' [section.key=value ...]\n"
        "       [--follow] [--on-bad-file skip]",
        description="Train on a log that comes in files, one after the other by name. Each is\n"
        "scored with the model so far, then trained on once; new ids get rows, weights and\n"
        "moments are kept. Started again, it takes the files that are new.",
        epilog="results, in the run folder:\n"
        "  metrics.jsonl      a line for each file: AUC and logloss before it was trained on\n"
        "  periods.png        the same as a picture\n"
        "  period_0001, ...   a run folder for each file: predict, export and open_run take it\n\n"
        "keys that matter here (launch.py --help has all): data.admission_periods, data.max_rows,\n"
        "data.evict, and min_count in the schema; checkpoint.keep: periods whose checkpoints stay",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", metavar="CONFIG.yaml", help="a job on a raw log")
    parser.add_argument("overrides", nargs="*", default=[], metavar="section.key=value")
    parser.add_argument(
        "--follow", action="store_true", help="wait for more files; SIGTERM or Ctrl-C ends it"
    )
    parser.add_argument(
        "--on-bad-file",
        choices=["error", "skip"],
        default="error",
        help="a file that cannot be read, or comes too late: stop, or leave it out; default error",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
