"""Runs under torchrun, of which a worker or everything is killed."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from itertools import cycle
from pathlib import Path

from support.paths import ROOT
from support.soak.killing import in_stage, kill_at
from support.soak.launching import HangError, stop
from support.soak.places import place_in
from support.soak.runs import all_whole, continued_after

# Seconds in which several processes must start on a busy machine, or a run end.
DEADLINE = 1800

_WATCHED = Path(__file__).with_name("watched_launch.py")


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
            # What workers have said is to be there when they are killed.
            "PYTHONUNBUFFERED": "1",
            # Seconds that torchrun gives the other workers to end.
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5",
        }  # fmt: skip
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            "--nproc_per_node", str(ranks), "--max-restarts", "1000",
            str(_WATCHED), str(folder), *map(str, arguments),
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
            return self._process.wait(DEADLINE)
        except subprocess.TimeoutExpired:
            raise HangError(f"still running after {DEADLINE} s:\n{self.said}") from None

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
            heard = _check_continued(torchrun, kills, heard)
            gone = {torchrun.place(other).pid for other in range(ranks)}
            kills.append(kill_at(place, run))
            os.kill(place.pid, signal.SIGKILL)
        status = torchrun.end()
        assert status == 0, torchrun.said
        went_on = _check_continued(torchrun, kills, heard) > heard
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


def _check_continued(torchrun, kills, heard):
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
        if time.monotonic() > begun + DEADLINE:
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
