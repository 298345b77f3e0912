"""The periods of a log that comes in files: each is scored, then trained on once."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from stampede.data.errors import DataError
from stampede.data.raw.files import expand, naturally
from stampede.engine.checkpoint import delete_all
from stampede.engine.config import Config
from stampede.engine.config.data import RawSection
from stampede.engine.config.load import load_config
from stampede.engine.console import readable_metric
from stampede.engine.errors import InterruptedRunError, RunFolderError
from stampede.engine.evaluate import NEW_IDS
from stampede.engine.figures import draw_periods
from stampede.engine.inference.kept import INPUTS
from stampede.engine.processes import Processes, processes
from stampede.engine.run import run_here
from stampede.engine.run_folder import RunFolder
from stampede.engine.start_up import launched_world_size
from stampede.engine.stop import Agreement, StopSignals
from stampede.files import delete_folder, read_file, sync, write_file
from stampede.settings import Section, SettingsError, reading

OnBadFile = Literal["error", "skip"]

LEDGER, PICTURE = "periods.json", "periods.png"

# What `train` would have printed, in a period's run folder.
OUTPUT = "output.txt"

# A file that another program writes is taken when its size has not changed for so long.
_AT_REST_SECONDS, _POLL_SECONDS = 5.0, 1.0

# What a period's line has of the scores of its rows.
_METRICS = ("auc", "logloss", "normalized_entropy", "calibration", "samples")


class Period(Section):
    """A file of the log, or one that was left out.

    Attributes:
        number: from 1; 0 of a file that was left out.
        file: its absolute path.
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
    given = [*overrides, "checkpoint.resume=auto"]
    whole = load_config(path, given, launched_world_size())
    if not isinstance(whole.data, RawSection):
        raise SettingsError(
            f"{path}: data.kind is {whole.data.kind!r}, which has no files that come one after the "
            "other; write criteo_kaggle, criteo_1tb, avazu or table"
        )
    whole = load_config(path, [*given, "data.split=periods"], launched_world_size())
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
    # A power failure may have left half a line.
    folder.keep_whole_lines()


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
        """Train on all new files, and where `follow` says so on those to come."""
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
            told, began = False, time.perf_counter()
            # Training has its own way to stop.
            if self._is_trained(period):
                taken += 1
                with signals.watched():
                    seconds = time.perf_counter() - began
                    self._here.on_main(lambda one=period, took=seconds: self._finish(one, took))
        if self._here.is_main:
            self._draw()
            what = f"{taken} new periods in" if taken else "no new file for"
            print(f"{what} {self._folder.path}, see {PICTURE}")

    def _next(self, follow: bool) -> Period | None:
        """The period to train, noted in the ledger; None if there is no new file."""
        ledger = self._read()
        # It may have been killed in the middle, or before its line was written.
        if ledger.trained and not self._is_told(ledger.trained[-1]):
            return self._begun_before(ledger)
        for file in self._new_files(ledger, follow):
            number = len(ledger.trained) + 1
            period = Period(number=number, file=str(file), bytes=file.stat().st_size)
            before = [Path(one.file) for one in ledger.trained]
            if before and naturally(file) < naturally(before[-1]):
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

    def _begun_before(self, ledger: Ledger) -> Period:
        """The last period of the ledger, whose file may have been mended since."""
        period = ledger.trained[-1]
        run, file = RunFolder(self._folder.path / period.name), Path(period.file)
        if run.summary.exists() or any(run.checkpoints.glob("*")) or not file.is_file():
            return period
        mended = period.model_copy(update={"bytes": file.stat().st_size})
        others = [one for one in ledger.periods if one is not period]
        self._write(Ledger(periods=[*others, mended]))
        return mended

    def _new_files(self, ledger: Ledger, follow: bool) -> list[Path]:
        """Files that are not in the ledger, in order, up to one that is still being written.

        Raises:
            DataError: there is no file, or one that was trained on has changed.
        """

        taken = {Path(one.file): one for one in ledger.periods}
        try:
            files = [Path(os.path.abspath(file)) for file in expand(self._whole.data.path)]
        except DataError:
            if follow:
                return []
            raise
        # Of several patterns, too.
        files.sort(key=naturally)
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

    def _is_trained(self, period: Period) -> bool:
        """Train a period to its end; False if it is left out."""
        run = self._folder.path / period.name
        if self._here.on_main(lambda: (run / "summary.json").exists()):
            return True
        printed = StringIO()
        try:
            # Forty lines for each file would hide what is new.
            with redirect_stdout(printed):
                run_here(self._config(period), self._here)
            self._here.on_main(lambda: self._write_file(run / OUTPUT, printed.getvalue()))
        except DataError as failure:
            # Of the file itself; a full disk is no fault of it.
            of_file = str(failure).startswith(f"{period.file}:")
            known = getattr(failure, "known_to_all_ranks", False)
            if self._on_bad_file == "error" or not (of_file and known):
                raise
            reason = str(failure)
            self._here.on_main(lambda: self._leave_out(period, reason))
            return False
        return True

    def _config(self, period: Period) -> Config:
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
            own["data.period_before"] = str(before / INPUTS)
            own["checkpoint.init_from"] = str(before)
            own["checkpoint.init_state"] = "all"
        given = [f"{key}={json.dumps(value)}" for key, value in own.items()]
        return load_config(self._path, [*self._overrides, *given], self._here.world_size)

    def _finish(self, period: Period, seconds: float) -> None:
        """Note a period's result and delete what no later one needs; may be done again.

        Args:
            seconds: that it took in this process, training among them.
        """
        run = self._folder.path / period.name
        summary = json.loads(read_file(run / "summary.json"))
        if not self._is_told(period):
            scored = summary["last"]["test"]
            names = [prefix + name for prefix in ("", NEW_IDS) for name in _METRICS]
            line = {
                "kind": "period",
                "period": period.number,
                "step": summary["steps"],
                "file": period.file,
                "rows": summary["rows"]["train"],
                "ids": summary["ids"],
                **{name: scored[name] for name in names if name in scored},
                "train_seconds": summary["train_seconds"],
                "seconds": seconds,
                "peak_memory_bytes": summary["peak_memory_bytes"],
            }
            self._folder.log(line)
            print(_shown(line), flush=True)
        self._draw()
        shutil.rmtree(self._folder.path / "cache", ignore_errors=True)
        last = period.number - self._whole.checkpoint.keep
        for older in (self._folder.path / f"period_{number:04d}" for number in range(1, last + 1)):
            # What somebody reads now, and the vocabularies with it, goes after a later period.
            if (older / INPUTS).exists() and delete_all(older / "checkpoints"):
                delete_folder(older / INPUTS)

    def _draw(self) -> None:
        lines = [line for line in self._folder.lines() if line["kind"] == "period"]
        if lines:
            picture = draw_periods(lines, self._whole.run.name)
            self._write_file(self._folder.path / PICTURE, picture)

    def _is_told(self, period: Period) -> bool:
        return any(
            line["kind"] == "period" and line["period"] == period.number
            for line in self._folder.lines()
        )

    def _leave_out(self, period: Period, reason: str) -> None:
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
        remedy = "without it nobody knows which files were trained on; write another run.name"
        with reading(self._ledger_file, RunFolderError, remedy):
            return Ledger.model_validate_json(read_file(self._ledger_file))

    def _write(self, ledger: Ledger) -> None:
        self._write_file(self._ledger_file, ledger.model_dump_json(indent=1) + "\n")

    def _write_file(self, path: Path, content: str | bytes) -> None:
        with self._folder.writing():
            write_file(path, content)
            # After a power failure the ledger must say what the lines and checkpoints do.
            sync(path)
            sync(path.parent)


def _shown(line: dict[str, Any]) -> str:
    """A period in a line of at most 100 columns where its file's name is short."""
    new = ""
    if line["period"] == 1:
        scores = "not scored: the first"
    else:
        scores = f"AUC {readable_metric(line['auc'])} logloss {line['logloss']:.4f}"
        if f"{NEW_IDS}auc" in line:
            new = f", AUC {readable_metric(line[f'{NEW_IDS}auc'])} where ids are new"
    return (
        f"period {line['period']:>3}  {Path(line['file']).name}  {line['rows']:>9,} rows  "
        f"{scores}{new}"
    )
