"""Runs that are killed again and again, each time to go on from what is left."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path

from support.paths import ROOT
from support.soak.launching import HangError, is_writing, place_in, stage_of, stop
from support.soak.runs import all_whole, continued_after, newest_step
from support.waiting import HANG

STAGES = ("start", "training", "evaluation", "save")


@dataclass(frozen=True)
class Moment:
    """When to kill.

    Attributes:
        stage: one of `STAGES`, which the process is in when it is killed; None: at any time.
        skip: how often that stage is passed by first.
        delay: seconds from its beginning, or from that of the process.
    """

    stage: str | None
    skip: int
    delay: float

    def sooner(self):
        """About halfway there."""
        return replace(self, skip=self.skip // 2, delay=self.delay / 2)


@dataclass(frozen=True)
class Kill:
    """What was found after a kill.

    Attributes:
        stage: of the main thread, see `stage_of`.
        writing: whether a checkpoint was being written.
        done: steps that the run had taken.
        newest: steps in the newest checkpoint.
    """

    stage: str
    writing: bool
    done: int
    newest: int

    @property
    def again(self):
        """Steps that must be done again."""
        return self.done - self.newest

    @property
    def stages(self):
        """Names of `STAGES`; a kill may fall into two."""
        stages = {"training" if self.stage == "saving" else self.stage}
        return stages | {"save"} if self.writing or self.stage == "saving" else stages


def random_moment(draw, stage, seconds):
    """A moment in a stage, or with None at any time of a run of so many seconds."""
    if stage is None:
        return Moment(None, 0, draw.uniform(0, seconds))
    longest = {"start": 0.5, "training": 0.01, "evaluation": 0.02, "save": 0.02}[stage]
    # A start happens once.
    return Moment(stage, 0 if stage == "start" else draw.randrange(4), draw.uniform(0, longest))


def killed_run(worker, arguments, run: Path, moments):
    """Run the launcher, kill it at each moment and go on, at last to the end.

    Args:
        worker: its process.
        arguments: of the launcher, to go on from what is there.
        run: the run folder.
        moments: those that the run has ended before are left out.

    Returns:
        The kills.

    Raises:
        AssertionError: a run did not go on from the newest checkpoint, or left half of one.
    """
    kills = []
    for moment in moments:
        worker.start(arguments)
        if not reached(worker, run, moment):
            break
        worker.kill()
        _check_continued(worker.said, kills)
        all_whole(run)
        kills.append(kill_at(worker.place, run))
    else:
        worker.start(arguments)
    ended = worker.end(HANG)
    assert ended.status == 0, ended.said
    assert _check_continued(ended.said, kills), ended.said
    return kills


def kill_at(place, run):
    """What is found after a kill at a place, or just before it."""
    newest, done = newest_step(run) or 0, place and place.done
    if done is None:
        # No step was taken since the kill before, which has lost what there was to lose.
        done = newest
    return Kill(stage_of(place), is_writing(place, run), done, newest)


def _check_continued(said, kills):
    """A start that got so far as to say so went on from the newest checkpoint; whether it did."""
    assert "Traceback" not in said and "damaged checkpoint" not in said, said
    expected = [kills[-1].newest] if kills and kills[-1].newest else []
    found = continued_after(said)
    assert found in (expected, []), f"{found} instead of {expected} after {kills}:\n{said}"
    return found == expected


def reached(worker, run, moment):
    """Wait for the moment, at which the process then stands still; False if it ends before."""
    begun = time.monotonic()
    if moment.stage is None:
        while worker.running() and time.monotonic() < begun + moment.delay:
            time.sleep(0.001)
        return worker.running()
    seen, before, delay = 0, False, moment.delay
    while worker.running():
        now = in_stage(worker.place, run, moment.stage)
        if now and not before and seen >= moment.skip:
            time.sleep(delay)
            # Whether it has left the stage meanwhile is looked at while it cannot.
            if stop(worker.pid):
                if in_stage(worker.place, run, moment.stage):
                    return True
                worker.go_on()
            # It was too long for the stage.
            delay /= 2
        seen += now and not before
        before = now
        if time.monotonic() > begun + HANG:
            raise HangError(f"{moment} has not come, {worker.place}:\n{worker.said}")
        time.sleep(0.0003)
    return False


def in_stage(place, run, stage):
    """Whether a process is in one of `STAGES`."""
    if stage == "save":
        return is_writing(place, run)
    return stage_of(place) == stage


def table(kills):
    """How many kills fell into which stage, and how many steps they cost."""
    stages = Counter(stage for kill in kills for stage in kill.stages)
    return {
        "kills": len(kills),
        **{stage: stages[stage] for stage in STAGES},
        "steps done again at most": max(kill.again for kill in kills),
    }


class Torchrun:
    """A `torchrun --max-restarts` with the launcher.

    Args:
        folder: for what it says.
        arguments: of the launcher.
        ranks: number of workers.
    """

    def __init__(self, folder, arguments, ranks):
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._ranks = folder, ranks
        for path in folder.iterdir():
            path.unlink()
        environment = {
            **{name: value for name, value in os.environ.items() if name not in ("RANK",
               "WORLD_SIZE")},
            "PYTHONPATH": str(ROOT / "tests"),
            # What workers have said is to be there when they are killed.
            "PYTHONUNBUFFERED": "1",
            # Seconds that torchrun gives the other workers to end.
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5",
        }  # fmt: skip
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            "--nproc_per_node", str(ranks), "--max-restarts", "1000",
            "-m", "support.soak.launching", str(folder), *map(str, arguments),
        ]  # fmt: skip
        with (folder / "stdout").open("w") as out, (folder / "stderr").open("w") as err:
            self._process = subprocess.Popen(
                command, stdout=out, stderr=err, env=environment, cwd=ROOT
            )

    @property
    def said(self):
        return "".join((self._folder / name).read_text() for name in ("stdout", "stderr"))

    def place(self, rank):
        return place_in(self._folder / str(rank))

    def all_new(self, gone):
        """Whether all workers tell where they are, and none of them is one of these."""
        places = map(self.place, range(self._ranks))
        return all(place is not None and place.pid not in gone for place in places)

    def running(self):
        return self._process.poll() is None

    def end(self):
        """Its exit status."""
        try:
            return self._process.wait(HANG)
        except subprocess.TimeoutExpired:
            raise HangError(f"still running after {HANG} s:\n{self.said}") from None

    def kill(self):
        """Kill torchrun and all its workers; those it has started and that tell nothing yet too."""
        self._process.send_signal(signal.SIGSTOP)
        for pid in _descendants(self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()

    def close(self):
        if self.running():
            self.kill()


def killed_workers(folder, arguments, run, ranks, moments):
    """Kill a worker at each moment; torchrun goes on.

    Args:
        folder: for what torchrun says.
        arguments: of the launcher, for a new run.
        run: the run folder.
        ranks: number of workers.
        moments: a rank to kill and its `Moment`; those that the run has ended before are left out.

    Returns:
        The kills.
    """
    torchrun, kills, gone, heard = Torchrun(folder, arguments, ranks), [], set(), 0
    try:
        for rank, moment in moments:
            place = _reached(torchrun, run, rank, moment, gone)
            if place is None:
                break
            heard = _check_workers_continued(torchrun, kills, heard)
            gone = {torchrun.place(other).pid for other in range(ranks)}
            kills.append(kill_at(place, run))
            os.kill(place.pid, signal.SIGKILL)
        status = torchrun.end()
        assert status == 0, torchrun.said
        went_on = _check_workers_continued(torchrun, kills, heard) > heard
        assert went_on or not (kills and kills[-1].newest), torchrun.said
    finally:
        torchrun.close()
    return kills


def killed_trees(folder, arguments, run, ranks, moments):
    """Kill torchrun with all its workers at each moment, then start it anew.

    Arguments as above, but the launcher's must say to go on from what is there, and `ranks` are
    the numbers of workers of the starts, again and again.
    """
    kills = []
    for (rank, moment), count in zip([*moments, (0, None)], cycle(ranks), strict=False):
        rank %= count
        torchrun = Torchrun(folder, arguments, count)
        try:
            place = _reached(torchrun, run, rank, moment, ()) if moment is not None else None
            if place is None:
                assert torchrun.end() == 0, torchrun.said
            else:
                torchrun.kill()
        finally:
            torchrun.close()
        said = continued_after(torchrun.said)
        assert said in ([kills[-1].newest] if kills and kills[-1].newest else [], []), said
        if place is None:
            break
        all_whole(run)
        kills.append(kill_at(torchrun.place(rank), run))
    return kills


def _check_workers_continued(torchrun, kills, heard):
    """A restart that got so far as to say so went on from the newest checkpoint, or a later one.

    Of workers that live on, rank 0 may have published one after the kill.
    """
    assert "damaged checkpoint" not in torchrun.said, torchrun.said
    said = continued_after(torchrun.said)
    assert len(said) - heard <= 1, torchrun.said
    for step in said[heard:]:
        assert kills and kills[-1].newest <= step <= kills[-1].done + 1, (step, kills[-1])
    return len(said)


def _reached(torchrun, run, rank, moment, gone):
    """Wait until all workers are new and one is at the moment; it then stands still.

    Returns:
        Its place; None if the run ends before.
    """
    begun, seen, before, delay = time.monotonic(), 0, False, moment.delay
    while torchrun.running():
        if time.monotonic() > begun + HANG:
            raise HangError(f"{moment} has not come on rank {rank}:\n{torchrun.said}")
        place = torchrun.place(rank)
        if not torchrun.all_new(gone):
            time.sleep(0.01)
            continue
        now = in_stage(place, run, moment.stage) if moment.stage else True
        if now and not before and seen >= moment.skip:
            time.sleep(delay)
            if torchrun.running() and stop(place.pid):
                place = torchrun.place(rank)
                if moment.stage is None or in_stage(place, run, moment.stage):
                    return place
                os.kill(place.pid, signal.SIGCONT)
            delay /= 2
        seen += now and not before
        before = now
        time.sleep(0.0005)
    return None


def _descendants(pid):
    children = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(path.parent.name))
    found = []
    for child in children.get(pid, []):
        found += [child, *_descendants(child)]
    return found
