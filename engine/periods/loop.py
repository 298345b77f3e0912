"""The periods of a log that comes in files: each is scored, then trained on."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from stampede import stores
from stampede.data.errors import DataError, UnfinishedFileError
from stampede.data.learning.unknown_shares import compared
from stampede.data.prepared.manifest import read_manifest
from stampede.data.raw.files import expand, naturally
from stampede.engine.checkpoint.retention import delete_all, newest
from stampede.engine.config import Config
from stampede.engine.config.data import RawSection
from stampede.engine.config.load import load_config
from stampede.engine.config.recipe import SMALL_LOG
from stampede.engine.console import printing, readable_metric
from stampede.engine.errors import InterruptedRunError, RunFolderError
from stampede.engine.inference.kept import INPUTS
from stampede.engine.processes import Processes, processes
from stampede.engine.reading import first_time
from stampede.engine.results.plots import draw_periods
from stampede.engine.results.run_folder import PERIODS, RunFolder, period_folder
from stampede.engine.run import SCORED, run_here, score_here
from stampede.engine.start_up import launched_world_size
from stampede.engine.training.evaluate import NEW_IDS
from stampede.engine.watching.heartbeat import PHASES, Heartbeat
from stampede.engine.watching.stop import Agreement, StopRequestedError
from stampede.files import (
    MOST_MANIFEST,
    append,
    delete_folder,
    read_file,
    read_json,
    sync,
    write_file,
)
from stampede.settings import Section, SettingsError, counted, reading

OnBadFile = Literal["error", "skip"]

PICTURE = "periods.png"

# File in a period's run folder with what `train` prints.
OUTPUT = "output.txt"

# A file is complete once its size has not changed for this long; how often to look.
_AT_REST_SECONDS, _POLL_SECONDS = 5.0, 1.0

# Time of a file whose time cannot be read yet: later than all others.
_LATEST = 1 << 62

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


class Period(Section):
    """A file of the log.

    Attributes:
        number: from 1; 0 for a file that was left out.
        file: its absolute path.
        leads_to: the path with links resolved; it identifies the file as well.
        bytes: its size.
        time: its smallest time in seconds since 1970, if files are ordered by time.
        replay: number of earlier files that a new model is also trained on; 0: none, the model of
            the period before goes on.
        reason: why it was left out; otherwise empty.
    """

    number: int = Field(ge=0)
    file: str
    leads_to: str = ""
    bytes: int = Field(ge=0)
    time: int | None = None
    replay: int = Field(0, ge=0)
    reason: str = ""


class Ledger(Section):
    """Which files were taken, in order."""

    periods: list[Period] = Field(default_factory=list)


def train_incrementally(
    path: Path, overrides: Sequence[str], on_bad_file: OnBadFile = "error", follow: bool = False
) -> None:
    """Score each new file of a log with the model so far, then train on it.

    Args:
        path: YAML file; `data.path` names the files of the log.
        on_bad_file: for a file that cannot be read, or comes before a trained one: `error`, or
            `skip` to note it and leave it out.
        follow: whether to wait for more files, until SIGTERM or SIGINT.

    Raises:
        SettingsError, DataError, RunFolderError: a mistake that the user can fix.
        TrainingStoppedError: training cannot continue.
        InterruptedRunError: a signal asked to stop.
    """
    whole = load_config(path, overrides, launched_world_size())
    if not isinstance(whole.data, RawSection):
        raise SettingsError(
            f"{path}: data.kind is {whole.data.kind!r}, which is not a log of several files; write "
            "criteo_kaggle, criteo_1tb, avazu or table (`stampede synthetic FOLDER` writes files "
            "for criteo_kaggle)"
        )
    if whole.run.overwrite:
        raise SettingsError(
            "run.overwrite: found true, but periods always continue where they stopped; delete "
            "this key; to start from scratch, delete the run folder or choose another run.name"
        )
    given = [*overrides, "checkpoint.resume=auto", "data.split=periods"]
    whole = load_config(path, given, launched_world_size())
    folder = RunFolder(os.path.join(whole.run.dir, whole.run.name))

    def begin() -> None:
        folder.reserve(whole)
        if folder.checkpoints.exists():
            raise RunFolderError(
                f"{folder.path} holds a run of `train`; choose another run.name for the periods"
            )
        folder.path.mkdir(parents=True, exist_ok=True)
        folder.write_config(whole)
        # A power failure may have left half a line.
        folder.keep_lines()
        with reading(folder.metrics, RunFolderError, "repair or delete that line"):
            folder.lines()

    with printing(not whole.run.quiet), processes(whole.run.device) as here, folder:
        here.on_main(begin)
        _Periods(path, overrides, whole, folder, here, on_bad_file).train(follow)


@dataclass
class _Periods:
    """The periods of a log; all ranks make the same calls."""

    path: Path
    overrides: Sequence[str]
    whole: Config
    folder: RunFolder
    here: Processes
    on_bad_file: OnBadFile
    # Sizes of new files, and since when they have had them.
    _sizes: dict[Path, tuple[int, float]] = field(default_factory=dict)
    # Times of new files, by path and size.
    _times: dict[tuple[Path, int], int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._ledger_file = self.folder.path / PERIODS
        self._cache = self.folder.path / "cache"
        if "cache" in self.whole.data.model_fields_set:
            # The cache is deleted after each period, so it must not be shared with other runs.
            own = hashlib.sha256(os.path.realpath(self.folder.path).encode()).hexdigest()[:8]
            self._cache = stores.local(self.whole.data.cache) / f"{self.whole.run.name}-{own}"

    def train(self, follow: bool) -> None:
        agreement = Agreement(self.here)
        taken, told = 0, False
        while True:
            with agreement.noting_signals():
                period = self.here.on_main(lambda: self._next(follow))
                try:
                    agreement.after(0)
                except StopRequestedError as stop:
                    raise InterruptedRunError(
                        f"stopped by {stop} between two periods; the same command continues",
                        stop.signal,
                    ) from None
                if period is None and follow:
                    if not told and self.here.is_main:
                        print(f"waiting for files: {self.whole.data.path}", flush=True)
                    told = True
                    time.sleep(_POLL_SECONDS)
                    continue
            if period is None:
                break
            told = False
            # Training handles signals itself.
            with _timed(self.here.heartbeat) as seconds:
                is_trained = self._is_trained(period, follow)
            if is_trained:
                taken += 1
                with agreement.noting_signals():
                    self.here.on_main(lambda one=period, took=seconds: self._finish(one, took))
        if self.here.is_main:
            self._draw()
            what = f"{counted(taken, 'new period')} in" if taken else "no new file for"
            print(f"{what} {self.folder.path}, see {PICTURE}")

    def _run_of(self, period: Period) -> Path:
        return self.folder.path / period_folder(period.number)

    def _next(self, follow: bool) -> Period | None:
        """The period to train, noted in the ledger; None if there is no new file."""
        trained = [period for period in self._read() if period.number]
        # The last period may have been killed before its line was written.
        if trained and not self._is_told(trained[-1]):
            begun = trained[-1]
            if follow and not self._is_at_rest(stores.at(begun.file)):
                return None
            if begun.replay and newest(self._run_of(begun) / "checkpoints") is None:
                # Earlier files may have gone since it was noted.
                begun = begun.model_copy(update={"replay": self._replay(begun, trained[:-1])})
                ledger = self._read()
                self._write([begun if one.number == begun.number else one for one in ledger])
            return begun
        # A file without a time does not limit later ones.
        last = next((one for one in reversed(trained) if one.time != _LATEST), None)
        for period in self._new_files(follow):
            if last is None or self._place(period) >= self._place(last):
                period = period.model_copy(update={"replay": self._replay(period, trained)})
                self._write([*self._read(), period])
                return period
            late = (
                f"{period.file}: comes before {last.file}, which was already trained on; "
                "leave it out with --on-bad-file skip"
            )
            if self.on_bad_file == "error":
                raise DataError(late)
            self._leave_out(period, late)
        return None

    def _replay(self, period: Period, trained: list[Period]) -> int:
        """How many of the trained files a period trains on again, see `train.replay`."""
        most = self.whole.train.replay
        wanted = len(trained) if most is None else min(most, len(trained))
        if most is None:
            rows, size = sum(line["rows"] for line in self._lines()), sum(p.bytes for p in trained)
            # As if the rows of the new file had the size of the others.
            if rows * (size + period.bytes) >= SMALL_LOG * size:
                return 0
        for one in trained[len(trained) - wanted :]:
            if stores.exists(one.file):
                continue
            if most is not None:
                raise DataError(
                    f"{one.file}: does not exist, but train.replay={most} trains on it again; "
                    "restore it, or write train.replay=0"
                )
            told = f"{one.file} is gone: the model of the period before goes on with the new file"
            print(f"{told} (train.replay)", file=sys.stderr, flush=True)
            return 0
        return wanted

    def _replayed(self, period: Period) -> list[Period]:
        """The files that a period trains on again."""
        before = [one for one in self._read() if 0 < one.number < period.number]
        return before[len(before) - period.replay :]

    def _place(self, period: Period) -> tuple[int, list[Any]]:
        """The sort key of periods."""
        return period.time or 0, naturally(stores.at(period.file))

    def _time(self, file: Path, size: int) -> int | None:
        if self.whole.data.order_by != "time":
            return None
        if (file, size) not in self._times:
            found = None
            with suppress(DataError):
                found = first_time(self.whole.data, file)
            self._times[file, size] = _LATEST if found is None else found
        return self._times[file, size]

    def _new_files(self, follow: bool) -> list[Period]:
        """Files that are not in the ledger, in order, up to one that is still being written."""
        ledger = self._read()
        number = 1 + sum(one.number > 0 for one in ledger)
        taken = {path: one for one in ledger for path in (one.file, one.leads_to)}
        try:
            files = [_absolute(file) for file in expand(self.whole.data.path)]
        except DataError:
            if follow:
                return []
            raise
        new = []
        for file in files:
            leads_to = str(file) if stores.is_url(file) else os.path.realpath(file)
            about = {"file": str(file), "leads_to": leads_to}
            size = stores.length(file)
            before = taken.get(about["file"]) or taken.get(about["leads_to"])
            if before is None:
                about |= {"bytes": size, "time": self._time(file, size)}
                new.append(Period(number=number, **about))
            elif before.number and before.bytes != size:
                raise DataError(
                    f"{file}: was trained on with {before.bytes:,} bytes and has {size:,} "
                    "now; put new rows into a new file"
                )
        new.sort(key=self._place)
        if follow:
            at_rest = [self._is_at_rest(stores.at(one.file)) for one in new]
            new = new[: [*at_rest, False].index(False)]
        return new

    def _is_at_rest(self, file: Path) -> bool:
        """Whether a file is complete: its size has not changed for a while, or it is gone."""
        size = stores.length(file) if stores.exists(file) else 0
        before, since = self._sizes.get(file, (-1, 0.0))
        if before != size:
            self._sizes[file] = (size, time.monotonic())
            return False
        return time.monotonic() - since >= _AT_REST_SECONDS

    def _is_trained(self, period: Period, follow: bool) -> bool:
        """Train a period; False if it is left out or its file is not complete."""
        run = self._run_of(period)
        if self.here.on_main(lambda: (run / "summary.json").exists()):
            return True
        again = self.here.on_main(lambda: [one.file for one in self._replayed(period)])
        printed, scored = StringIO(), None
        try:
            # Forty lines per file would hide the news.
            with redirect_stdout(printed):
                if again:
                    # By the model before, as a new one is trained on these rows.
                    scored = score_here(self._config(period), self.here, period.number)
                run_here(self._config(period, again), self.here, scored)
        except UnfinishedFileError:
            if not follow:
                raise
            return False
        except DataError as failure:
            # Leave a file out only for its own errors, not for a full disk.
            of_file = str(failure).startswith(f"{period.file}:")
            known = getattr(failure, "known_to_all_ranks", False)
            if self.on_bad_file == "error" or not (of_file and known):
                raise
            reason = str(failure)
            self.here.on_main(lambda: self._leave_out(period, reason))
            return False
        finally:
            if self.here.is_main and run.is_dir():
                with suppress(OSError):
                    append(run, OUTPUT, printed.getvalue().encode())
            elif self.here.is_main:
                # It failed before it had a folder.
                print(printed.getvalue(), end="", flush=True)
        return True

    def _config(self, period: Period, again: Sequence[str] = ()) -> Config:
        """Of a period that goes on with the model before, or of a new one also of files `again`."""
        own = {
            "run.dir": str(self.folder.path),
            "run.name": period_folder(period.number),
            "data.path": period.file,
            "data.split": "periods",
            "data.cache": str(self._cache),
            "checkpoint.resume": "auto",
        }
        if again:
            own["data.path"] = [*again, period.file]
            own["train.replay"] = period.replay
        elif period.number > 1:
            own["train.replay"] = 0
            before = self.folder.path / period_folder(period.number - 1)
            own["data.period_before"] = str(before / INPUTS)
            own["checkpoint.init_from"] = str(before)
            own["checkpoint.init_state"] = "all"
        given = [f"{key}={json.dumps(value)}" for key, value in own.items()]
        return load_config(self.path, [*self.overrides, *given], self.here.world_size)

    def _finish(self, period: Period, seconds: Mapping[str, float]) -> None:
        """Note a period's result and delete what later periods do not need; safe to repeat."""
        run = self._run_of(period)
        summary = read_json(run / "summary.json")
        if not self._is_told(period):
            rows = summary["rows"]["train"]
            read = read_manifest(run / INPUTS).source.get("bytes", period.bytes)
            if period.replay:
                again = self._replayed(period)
                read -= sum(one.bytes for one in again)
                numbers = [one.number for one in again]
                rows -= sum(line["rows"] for line in self._lines() if line["period"] in numbers)
            if read != period.bytes:
                # The file grew after it was noted in the ledger.
                time = self._time(stores.at(period.file), read)
                found = {"bytes": read, "time": period.time if time == _LATEST else time}
                other = period.model_copy(update=found)
                self._write([other if one.file == period.file else one for one in self._read()])
            scored = summary["last"]["test"]
            names = [prefix + name for prefix in ("", NEW_IDS) for name in _METRICS]
            # All ids of the first are new: their scores say nothing, even after a warm start.
            is_first = period.number == 1

            def metrics(of: Mapping[str, Any]) -> dict[str, Any]:
                return {n: None if is_first else of[n] for n in names if n in of}

            goals = {goal: metrics(of_goal) for goal, of_goal in scored.get("goals", {}).items()}
            line = {
                "kind": "period",
                "period": period.number,
                "step": summary["steps"],
                "file": period.file,
                "rows": rows,
                "ids": summary["ids"],
                **metrics(scored),
                **({"goals": goals} if goals else {}),
                "train_seconds": summary["train_seconds"],
                "seconds": sum(seconds.values()),
                "part_seconds": dict(seconds),
                "peak_memory_bytes": summary["peak_memory_bytes"],
            }
            self.folder.log(line)
            print(_shown(line), flush=True)
            self._tell_unknown(period)
        self._draw()
        shutil.rmtree(self._cache, ignore_errors=True)
        last = period.number - self.whole.checkpoint.keep
        for older in (self.folder.path / period_folder(number) for number in range(1, last + 1)):
            # Checkpoints that are being read, and their vocabularies, are deleted later.
            if (older / INPUTS).exists() and delete_all(older / "checkpoints"):
                delete_folder(older / INPUTS)
        self.folder.publish()

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
        run = self.folder.path / period_folder(number)
        if (run / SCORED).exists():
            return read_json(run / SCORED)
        return read_manifest(run / INPUTS).source

    def _lines(self) -> list[dict[str, Any]]:
        return [line for line in self.folder.lines() if line["kind"] == "period"]

    def _draw(self) -> None:
        if lines := self._lines():
            picture = draw_periods(lines, self.whole.run.name)
            self._write_file(self.folder.path / PICTURE, picture)

    def _is_told(self, period: Period) -> bool:
        return period.number in [line["period"] for line in self._lines()]

    def _leave_out(self, period: Period, reason: str) -> None:
        others = [one for one in self._read() if one.file != period.file]
        left_out = period.model_copy(update={"number": 0, "reason": reason})
        if self._run_of(period).exists():
            delete_folder(self._run_of(period))
        self._write([*others, left_out])
        step = max([0, *(line["step"] for line in self.folder.lines())])
        self.folder.log({"kind": "left_out", "step": step, "file": period.file, "reason": reason})
        print(f"left out: {reason}", file=sys.stderr, flush=True)

    def _read(self) -> list[Period]:
        if not self._ledger_file.exists():
            return []
        remedy = "it lists the files already trained on; restore it, or write another run.name"
        with reading(self._ledger_file, RunFolderError, remedy):
            return Ledger.model_validate_json(read_file(self._ledger_file, MOST_MANIFEST)).periods

    def _write(self, periods: list[Period]) -> None:
        text = Ledger(periods=periods).model_dump_json(indent=1)
        self._write_file(self._ledger_file, text + "\n")

    def _write_file(self, path: Path, content: str | bytes) -> None:
        with self.folder.writing():
            write_file(path, content)
            # After a power failure the ledger must agree with the lines and checkpoints.
            sync(path)
            sync(path.parent)


def _absolute(file: Path) -> Path:
    """A file by a path that does not depend on the working folder."""
    return file if stores.is_url(file) else Path(os.path.abspath(file))


@contextmanager
def _timed(heartbeat: Heartbeat) -> Iterator[Mapping[str, float]]:
    """Yield the seconds by part, filled in when the context ends."""
    seconds: dict[str, float] = defaultdict(float)
    part, since = "other", time.perf_counter()

    def begin(stage: str) -> None:
        nonlocal part, since
        now = time.perf_counter()
        seconds[part] += now - since
        part, since = _PARTS.get(stage, "other"), now

    with heartbeat.listening(begin):
        yield seconds
        begin("")


def _shown(line: dict[str, Any]) -> str:
    """A period's line, at most 100 columns if its file's name is short."""
    scores = "not scored: the first"
    if line["period"] != 1:
        scores = f"AUC {readable_metric(line['auc'])} logloss {line['logloss']:.4f}"
        if (rows := line.get(f"{NEW_IDS}samples") or 0) >= _FEWEST_NEW:
            new = readable_metric(line[f"{NEW_IDS}auc"])
            scores += f", AUC {new} in {rows:,} rows where ids are new"
    name = Path(line["file"]).name
    return f"period {line['period']:>3}  {name}  {line['rows']:>9,} rows  {scores}"
