"""Runs that are killed again and again, each time to go on from what is left."""

import os
import signal
import time
from collections import Counter
from dataclasses import dataclass, replace
from itertools import cycle

from support.soak.launching import HangError, Torchrun, is_writing, stage_of, stop
from support.soak.runs import all_whole, continued_after, newest_step
from support.waiting import HANG

STAGES = ("start", "training", "evaluation", "save")


@dataclass(frozen=True)
class Moment:
    """When to kill.

    Attributes:
        rank: that is to be there.
        stage: one of `STAGES`, which the rank is in when it is killed; None: at any time.
        skip: how often that stage is passed by first.
        delay: seconds from its beginning, or from that of the process.
    """

    rank: int
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
        stages: names of `STAGES`; two if a checkpoint was being written.
        done: steps that the run had taken.
        newest: steps in the newest checkpoint.
    """

    stages: frozenset[str]
    done: int
    newest: int


def random_moment(draw, stage, seconds=0, ranks=1):
    """A moment in a stage, or with None at any time of a run of so many seconds."""
    rank = draw.randrange(ranks)
    if stage is None:
        return Moment(rank, None, 0, draw.uniform(0, seconds))
    longest = {"start": 0.5, "training": 0.01, "evaluation": 0.02, "save": 0.02}[stage]
    # A start happens once.
    skip = 0 if stage == "start" else draw.randrange(4)
    return Moment(rank, stage, skip, draw.uniform(0, longest))


def reached(launched, run, moment, gone=()):
    """Wait for the moment, at which the rank then stands still; False if the run ends before.

    Args:
        gone: processes that have been killed; all ranks are to be new.
    """
    begun, seen, before, delay = time.monotonic(), 0, False, moment.delay
    while launched.running():
        if time.monotonic() > begun + HANG:
            raise HangError(f"{moment} has not come:\n{launched.said}")
        now = launched.is_new(gone) and _is_there(launched, run, moment)
        if now and not before and seen >= moment.skip:
            time.sleep(delay)
            # Whether it has left the stage meanwhile is looked at while it cannot.
            if stop(launched.pid(moment.rank)):
                if _is_there(launched, run, moment):
                    return True
                os.kill(launched.pid(moment.rank), signal.SIGCONT)
            # It was too long for the stage.
            delay /= 2
        seen += now and not before
        before = now
        time.sleep(0.0005)
    return False


def _is_there(launched, run, moment):
    place = launched.place(moment.rank)
    if moment.stage == "save":
        return is_writing(place, run)
    return moment.stage in (None, stage_of(place))


def kill_at(place, run):
    """What is found after a kill at a place, or just before it."""
    newest, done, stage = newest_step(run) or 0, place and place.done, stage_of(place)
    stages = {"training" if stage == "saving" else stage}
    if stage == "saving" or is_writing(place, run):
        stages.add("save")
    # If no step was taken since the kill before, that one has lost what there was to lose.
    return Kill(frozenset(stages), newest if done is None else done, newest)


def killed_runs(start, run, moments, ranks=(1,)):
    """Start a run, kill all its processes at each moment and start it anew, at last to the end.

    Args:
        start: starts the launcher on so many ranks, to go on from what is there.
        run: the run folder.
        moments: those that the run has ended before are left out.
        ranks: numbers of processes of the starts, again and again.

    Returns:
        The kills.

    Raises:
        AssertionError: a run did not go on from the newest checkpoint, or left half of one.
    """
    kills = []
    for moment, count in zip([*moments, None], cycle(ranks), strict=False):
        launched = start(count)
        try:
            if moment is not None:
                moment = replace(moment, rank=moment.rank % count)
            is_last = moment is None or not reached(launched, run, moment)
            if is_last:
                assert launched.end().status == 0, launched.said
        finally:
            launched.kill()
        said, expected = launched.said, [kills[-1].newest] if kills and kills[-1].newest else []
        # One that was killed may not have got so far as to say so.
        assert continued_after(said) in ([expected] if is_last else [expected, []]), said
        assert "damaged checkpoint" not in said, said
        # Of several ranks one may be told that another was killed before it.
        assert "Traceback" not in said or (count > 1 and not is_last), said
        if is_last:
            return kills
        all_whole(run)
        kills.append(kill_at(launched.place(moment.rank), run))
    raise AssertionError("there is always a last start")


def killed_workers(folder, arguments, run, ranks, moments):
    """Kill a worker of a new run at each moment; torchrun goes on.

    Args:
        folder: for what torchrun says.
        arguments: of the launcher.
        run: the run folder.
        ranks: number of workers.
        moments: those that the run has ended before are left out.

    Returns:
        The kills.
    """
    torchrun, kills, gone, heard = Torchrun(folder, arguments, ranks), [], set(), 0
    try:
        for moment in moments:
            if not reached(torchrun, run, moment, gone):
                break
            heard = _check_workers_continued(torchrun.said, kills, heard)
            gone = {torchrun.pid(rank) for rank in range(ranks)}
            kills.append(kill_at(torchrun.place(moment.rank), run))
            os.kill(torchrun.pid(moment.rank), signal.SIGKILL)
        assert torchrun.end().status == 0, torchrun.said
        went_on = _check_workers_continued(torchrun.said, kills, heard) > heard
        assert went_on or not (kills and kills[-1].newest), torchrun.said
    finally:
        torchrun.kill()
    return kills


def _check_workers_continued(said, kills, heard):
    """A restart that got so far as to say so went on from the newest checkpoint, or a later one.

    Of workers that live on, rank 0 may have published one after the kill.
    """
    assert "damaged checkpoint" not in said, said
    steps = continued_after(said)
    assert len(steps) - heard <= 1, said
    for step in steps[heard:]:
        assert kills and kills[-1].newest <= step <= kills[-1].done + 1, (step, kills[-1])
    return len(steps)


def table(kills):
    """How many kills fell into which stage, and how many steps they cost."""
    stages = Counter(stage for kill in kills for stage in kill.stages)
    return {
        "kills": len(kills),
        **{stage: stages[stage] for stage in STAGES},
        "steps done again at most": max(kill.done - kill.newest for kill in kills),
    }
