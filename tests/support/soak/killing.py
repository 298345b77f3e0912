"""Runs of one process that are killed again and again, each time to go on from what is left."""

import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from support.soak.launching import HangError, stop
from support.soak.places import is_writing, stage_of
from support.soak.runs import all_whole, continued_after, newest_step

# Seconds in which a run of seconds must get anywhere on a busy machine.
DEADLINE = 1200

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
    ended = worker.end(DEADLINE)
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
        if time.monotonic() > begun + DEADLINE:
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
