"""Trains on the periods of a log, one after another, and continues wherever it was killed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import Literal

from stampede import stores
from stampede.data.errors import DataError, UnfinishedFileError
from stampede.data.prepared.manifest import read_manifest
from stampede.engine.checkpoint.retention import delete_all, newest
from stampede.engine.config import Config
from stampede.engine.config.data import RawSection
from stampede.engine.config.load import load_config
from stampede.engine.config.recipe import SMALL_LOG
from stampede.engine.console import printing
from stampede.engine.errors import InterruptedRunError, RunFolderError
from stampede.engine.inference.kept import INPUTS
from stampede.engine.periods.files import LATEST, LogFiles, place
from stampede.engine.periods.ledger import Ledger, Period
from stampede.engine.periods.results import PICTURE, Results, timed
from stampede.engine.periods.scoring import score_before
from stampede.engine.processes import Processes, processes
from stampede.engine.reading import prepared
from stampede.engine.results.run_folder import RunFolder, period_folder
from stampede.engine.run import run_here
from stampede.engine.start_up import launched_world_size
from stampede.engine.watching.stop import Agreement, StopRequestedError
from stampede.files import append, delete_folder
from stampede.settings import SettingsError, counted, reading

OnBadFile = Literal["error", "skip"]

# File in a period's run folder with what `train` prints.
OUTPUT = "output.txt"

# How often to look for new files.
_POLL_SECONDS = 1.0


def train_incrementally(
    path: Path,
    overrides: Sequence[str],
    on_bad_file: OnBadFile = "error",
    follow: bool = False,
    prepare_only: bool = False,
) -> None:
    """Score each new file of a log with the model so far, then train on it.

    Args:
        path: YAML file; `data.path` names the files of the log.
        on_bad_file: for a file that cannot be read, or comes before a trained one: `error`, or
            `skip` to note it and leave it out.
        follow: whether to wait for more files, until SIGTERM or SIGINT.
        prepare_only: whether only to prepare the next file, for a later call.

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
        here.on_main(lambda: folder.reserve(whole))
        # Periods are folders here, and each reads what the one before has learned.
        folder.check_shared(here, must_share=True)
        here.on_main(begin)
        periods = _Periods(path, overrides, whole, folder, here, on_bad_file)
        periods.prepare() if prepare_only else periods.train(follow)


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
        self._path, self._overrides, self._whole = path, overrides, whole
        self._folder, self._here, self._on_bad_file = folder, here, on_bad_file
        self._ledger, self._results = Ledger(folder), Results(folder, whole.run.name)
        self._files = LogFiles(whole.data, self._ledger)
        self._cache = folder.path / "cache"
        if "cache" in whole.data.model_fields_set:
            # The cache is deleted after each period, so it must not be shared with other runs.
            of_run = folder.url or os.path.realpath(folder.path)
            own = hashlib.sha256(of_run.encode()).hexdigest()[:8]
            self._cache = stores.local(whole.data.cache) / f"{whole.run.name}-{own}"

    def train(self, follow: bool) -> None:
        """Train on all new files, or on each that comes until a signal."""
        agreement, taken = Agreement(self._here), 0
        for period in self._due(agreement, follow):
            # Training handles signals itself.
            with timed(self._here.heartbeat) as seconds:
                is_trained = self._is_trained(period, follow)
            if is_trained:
                taken += 1
                with agreement.noting_signals():
                    self._here.on_main(lambda one=period, took=seconds: self._finish(one, took))
        if self._here.is_main:
            self._results.draw()
            what = f"{counted(taken, 'new period')} in" if taken else "no new file for"
            print(f"{what} {self._folder.path}, see {PICTURE}")

    def prepare(self) -> None:
        """Prepare the next file as its training will read it, and leave the training to `train`.

        Later files wait for that training: their ids follow those of the files before.
        """

        if "cache" in self._whole.data.model_fields_set and stores.is_url(self._whole.data.cache):
            raise SettingsError(
                f"data.cache: found {self._whole.data.cache}, but --prepare-only writes to a "
                "folder that the machine of the training mounts, too; write one, or delete this "
                "key: then the rows are in the run folder, also if run.dir is a URL"
            )
        while (told := self._here.on_main(self._prepare_next)) is None:
            pass
        if self._here.is_main:
            print(told)

    def _prepare_next(self) -> str | None:
        """What to say of the next file; None if it was left out."""
        period = self._next(False)
        if period is None:
            return f"no new file for {self._folder.path}"
        again = [one.file for one in self._ledger.replayed(period)]
        # A new model of several files scores the last one with the model before.
        ways = [self._config(period), self._config(period, again)]
        try:
            places = dict.fromkeys(map(prepared, ways[: 1 + bool(again)]))
        except UnfinishedFileError:
            raise
        except DataError as failure:
            if not self._leaves_out(period, failure):
                raise
            self._leave_out(period, str(failure))
            return None
        return f"prepared {period.file} in {' and '.join(places)}"

    def _due(self, agreement: Agreement, follow: bool) -> Iterator[Period]:
        """The periods to train, one after another; ends when there is none, unless it follows."""
        is_waiting = False
        while True:
            with agreement.noting_signals():
                period = self._here.on_main(lambda: self._next(follow))
                try:
                    agreement.after(0)
                except StopRequestedError as stop:
                    raise InterruptedRunError(
                        f"stopped by {stop} between two periods; the same command continues",
                        stop.signal,
                    ) from None
                if period is None and follow:
                    if not is_waiting and self._here.is_main:
                        print(f"waiting for files: {self._whole.data.path}", flush=True)
                    time.sleep(_POLL_SECONDS)
            is_waiting = period is None
            if period is not None:
                yield period
            elif not follow:
                return

    def _next(self, follow: bool) -> Period | None:
        """The period to train, noted in the ledger; None if there is no new file."""
        trained = self._ledger.periods()
        # The last period may have been killed before its line was written.
        if trained and not self._results.has(trained[-1]):
            begun = trained[-1]
            if follow and not self._files.is_at_rest(begun):
                return None
            run = self._results.run_of(begun.number)
            if begun.replay and newest(run / "checkpoints") is None:
                # Earlier files may have gone since it was noted.
                begun = begun.model_copy(update={"replay": self._replay(begun, trained[:-1])})
                self._ledger.replace(begun)
            return begun
        # A file without a time does not limit later ones.
        last = next((one for one in reversed(trained) if one.time != LATEST), None)
        for period in self._files.new(at_rest=follow):
            if last is None or place(period) >= place(last):
                period = period.model_copy(update={"replay": self._replay(period, trained)})
                self._ledger.add(period)
                return period
            late = (
                f"{period.file}: comes before {last.file}, which was already trained on; "
                "leave it out with --on-bad-file skip"
            )
            if self._on_bad_file == "error":
                raise DataError(late)
            self._leave_out(period, late)
        return None

    def _replay(self, period: Period, trained: list[Period]) -> int:
        """How many of the trained files a period trains on again, see `train.replay`."""
        most = self._whole.train.replay
        wanted = len(trained) if most is None else min(most, len(trained))
        if most is None:
            rows = sum(line["rows"] for line in self._results.lines())
            size = sum(one.bytes for one in trained)
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

    def _is_trained(self, period: Period, follow: bool) -> bool:
        """Train a period; False if it is left out or its file is not complete."""
        run = self._results.run_of(period.number)
        if self._here.on_main(lambda: (run / "summary.json").exists()):
            return True
        again = self._here.on_main(lambda: [one.file for one in self._ledger.replayed(period)])
        printed, scored = StringIO(), None
        try:
            # Forty lines per file would hide the news.
            with redirect_stdout(printed):
                if again:
                    # By the model before, as a new one is trained on these rows.
                    scored = score_before(self._config(period), self._here, period.number)
                run_here(self._config(period, again), self._here, scored)
        except UnfinishedFileError:
            if not follow:
                raise
            return False
        except DataError as failure:
            known = getattr(failure, "known_to_all_ranks", False)
            if not (known and self._leaves_out(period, failure)):
                raise
            reason = str(failure)
            self._here.on_main(lambda: self._leave_out(period, reason))
            return False
        finally:
            if self._here.is_main and run.is_dir():
                with suppress(OSError):
                    append(run, OUTPUT, printed.getvalue().encode())
            elif self._here.is_main:
                # It failed before it had a folder.
                print(printed.getvalue(), end="", flush=True)
        return True

    def _config(self, period: Period, again: Sequence[str] = ()) -> Config:
        """Of a period that goes on with the model before, or of a new one also of files `again`."""
        own = {
            "run.dir": str(self._folder.path),
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
            before = self._results.run_of(period.number - 1)
            own["data.period_before"] = str(before / INPUTS)
            own["checkpoint.init_from"] = str(before)
            own["checkpoint.init_state"] = "all"
        given = [f"{key}={json.dumps(value)}" for key, value in own.items()]
        return load_config(self._path, [*self._overrides, *given], self._here.world_size)

    def _finish(self, period: Period, seconds: Mapping[str, float]) -> None:
        """Note a period's result and delete what later periods do not need; safe to repeat."""
        if not self._results.has(period):
            again = self._ledger.replayed(period)
            self._note_growth(period, again)
            self._results.tell(period, again, seconds)
        self._results.draw()
        shutil.rmtree(self._cache, ignore_errors=True)
        last = period.number - self._whole.checkpoint.keep
        for older in map(self._results.run_of, range(1, last + 1)):
            # Checkpoints that are being read, and their vocabularies, are deleted later.
            if (older / INPUTS).exists() and delete_all(older / "checkpoints"):
                delete_folder(older / INPUTS)
        self._folder.publish()

    def _note_growth(self, period: Period, again: list[Period]) -> None:
        """Note the bytes that were read, if the file grew after it was noted in the ledger."""
        inputs = self._results.run_of(period.number) / INPUTS
        of_others = sum(one.bytes for one in again)
        read = read_manifest(inputs).source.get("bytes", period.bytes + of_others) - of_others
        if read != period.bytes:
            first = self._files.time(stores.at(period.file), read)
            first = period.time if first == LATEST else first
            self._ledger.replace(period.model_copy(update={"bytes": read, "time": first}))

    def _leaves_out(self, period: Period, failure: DataError) -> bool:
        """Whether a file is left out for a failure; one that stops says how to leave it out."""
        # Only for its own errors, not for a full disk.
        if not str(failure).startswith(f"{period.file}:"):
            return False
        if self._on_bad_file == "error" and "--on-bad-file" not in str(failure):
            failure.args = (f"{failure}; or leave the file out with --on-bad-file skip",)
        return self._on_bad_file == "skip"

    def _leave_out(self, period: Period, reason: str) -> None:
        run = self._results.run_of(period.number)
        if run.exists():
            delete_folder(run)
        self._ledger.leave_out(period, reason)
