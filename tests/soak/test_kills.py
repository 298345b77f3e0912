"""Runs that are killed at random moments end as if nothing had been.

`make soak` kills a hundred times, `make slow` in each stage once.
"""

import shutil
from collections import Counter
from contextlib import nullcontext
from functools import partial
from itertools import cycle
from random import Random

import pytest

from stampede.engine.checkpoint.retention import readable, verify
from support.forked import ended
from support.jobs import SMALL, same_end
from support.soak import (
    KILLED,
    STAGES,
    Launched,
    continued_after,
    disturbed_torchrun,
    dying,
    kills_of,
    newest_step,
    random_moment,
    write_results,
)
from support.stopping import undisturbed_runs
from support.waiting import HANG

EVERY = 4
# 14 steps an epoch; seconds long, most of them in saves and evaluations.
LONG = [
    "data.rows=3700", "data.test_rows=1000", "train.epochs=2", "evaluate.every=5",
    f"checkpoint.every_steps={EVERY}", "sharding.plan=row_wise",
]  # fmt: skip
# Of a round: once in each stage, and at any time.
ROUND = [*STAGES, None, None]

# Of one start after the other, again and again.
RANKS = (2, 1, 4)

RESULTS = {}


@pytest.fixture(scope="module", autouse=True)
def results():
    """The soak's results are written when all is done."""
    RESULTS.clear()
    yield
    if RESULTS:
        write_results("kills_soak", "runs", RESULTS)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Runs that nothing happened to, by number of ranks."""
    return undisturbed_runs(tmp_path_factory, LONG)


def arguments(folder, *overrides):
    folder.mkdir(exist_ok=True)
    (folder / "small.yaml").write_text("")
    return [folder / "small.yaml", f"run.dir={folder}", *SMALL, *LONG, *overrides]


def killed_runs(folder, arguments, run, moments, ranks=(1,)):
    """Start a run, kill all its processes at each moment and start it anew, at last to the end.

    Args:
        folder: for what they say.
        arguments: of the launcher, to go on from what is there.
        run: the run folder.
        moments: those that the run has ended before are left out.
        ranks: numbers of processes of the starts, again and again.

    Returns:
        What was found after each kill.
    """
    kills = []
    for moment, count in zip([*moments, None], cycle(ranks), strict=False):
        disturbance, rank = nullcontext, moment.rank % count if moment else 0
        if moment:
            disturbance = partial(dying, moment, folder, run)
        end = Launched(folder, arguments, count, disturbance, rank).end()
        said, expected = end.said, [kills[-1]["newest"]] if kills and kills[-1]["newest"] else []
        is_last = end.status == 0
        # One that was killed may not have got so far as to say so.
        assert continued_after(said) in ([expected] if is_last else [expected, []]), said
        assert "damaged checkpoint" not in said, said
        # Of several ranks one may be told that another was killed before it.
        assert "Traceback" not in said or (count > 1 and not is_last), said
        if is_last:
            return kills
        assert end.status == 137, said
        for path, _ in readable(run / "checkpoints"):
            verify(path)
        # Another thread or rank may have published one before all were dead.
        (kill,) = kills_of(folder)
        last = newest_step(run) or 0
        kills.append({**kill, "newest": last, "done": max(kill["done"], last)})
    raise AssertionError("there is always a last start")


def killed_workers(folder, arguments, run, ranks, moments):
    """Kill a worker of a new run at each moment; torchrun goes on. See `killed_runs`."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    disturbances = [
        (moment.rank, [start], partial(dying, moment, folder, run))
        for start, moment in enumerate(moments)
    ]
    done = ended(disturbed_torchrun(folder, disturbances, arguments, ranks, len(moments)), HANG)
    assert done.returncode == 0, done
    kills, said = kills_of(folder), done.stdout
    assert "damaged checkpoint" not in said, said
    _, *starts = map(continued_after, said.split(KILLED))
    assert len(starts) == len(kills), said
    for number, (kill, steps) in enumerate(zip(kills, starts, strict=True), 1):
        # One that was killed itself may not have got so far as to say so.
        needed = number == len(kills) and kill["newest"]
        assert len(steps) == 1 or not (steps or needed), said
        # Of workers that live on, rank 0 may have published a checkpoint after the kill.
        assert all(kill["newest"] <= step <= kill["done"] + 1 for step in steps), (steps, kill)
    return kills


def table(kills):
    """How many kills fell into which stage, and how many steps they cost."""
    stages = Counter(stage for kill in kills for stage in kill["stages"])
    return {
        "kills": len(kills),
        **{stage: stages[stage] for stage in STAGES},
        "steps done again at most": max(kill["done"] - kill["newest"] for kill in kills),
    }


def in_rounds(draw, count, seconds, ranks, folder, undisturbed, kill):
    """Runs that are killed some times each, until so many random moments have come; the kills.

    The moments are of all stages alike; the first four are one of each.
    """
    stages = draw.sample(STAGES, len(STAGES))
    while len(stages) < count:
        stages += draw.sample(ROUND, len(ROUND))
    left = [random_moment(draw, stage, seconds, ranks) for stage in stages[:count]]
    found = []
    for number in range(3 * len(left)):
        kills = kill(folder / f"run_{number}", left[: len(ROUND)])
        same_end(folder / f"run_{number}/small", undisturbed)
        # One that has not come within a whole run is tried again later, and comes sooner: the
        # machine may have been slower when the run's length was measured.
        left = left[len(kills) :] if kills else [*left[1:], left[0].sooner()]
        found += kills
        if not left:
            break
    assert not left, "they have not come"
    seen = table(found)
    assert seen["steps done again at most"] <= 2 * EVERY
    assert all(seen[stage] >= max(len(found) // 12, 1) for stage in ("evaluation", "save")), seen
    assert all(seen[stage] >= len(found) // 12 for stage in STAGES), seen
    return seen


@pytest.mark.wide
@pytest.mark.parametrize("count", [len(STAGES), pytest.param(60, marks=pytest.mark.soak)])
def test_one_process(tmp_path, count):
    whole = Launched(tmp_path / "said", arguments(tmp_path / "undisturbed")).end()
    expected = tmp_path / "undisturbed/small"

    def kill(folder, moments):
        goes_on = arguments(folder, "checkpoint.resume=auto")
        return killed_runs(tmp_path / "said", goes_on, folder / "small", moments)

    seen = in_rounds(Random(count), count, whole.seconds, 1, tmp_path, expected, kill)
    if count > len(STAGES):
        RESULTS["one process"] = seen


@pytest.mark.soak
@pytest.mark.parametrize("ranks, count", [(2, 12), (4, 6)])
@pytest.mark.parametrize("what", ["a worker of torchrun", "everything"])
def test_several_processes(tmp_path, undisturbed, ranks, count, what):
    said = tmp_path / "said"

    def kill(folder, moments):
        if what == "a worker of torchrun":
            return killed_workers(said, arguments(folder), folder / "small", ranks, moments)
        goes_on = arguments(folder, "checkpoint.resume=auto")
        return killed_runs(said, goes_on, folder / "small", moments, (ranks,))

    seen = in_rounds(Random(ranks), count, 4, ranks, tmp_path, undisturbed(ranks), kill)
    RESULTS[f"{ranks} processes, {what} killed"] = seen


@pytest.mark.soak
def test_other_ranks_go_on(tmp_path, tmp_path_factory):
    reproducible = "train.reproducible=true"
    alone = undisturbed_runs(tmp_path_factory, [*LONG, reproducible])(1)

    def kill(folder, moments):
        goes_on = arguments(folder, "checkpoint.resume=auto", reproducible)
        return killed_runs(tmp_path / "said", goes_on, folder / "small", moments, RANKS)

    seen = in_rounds(Random(8), 12, 4, max(RANKS), tmp_path, alone, kill)
    RESULTS["another number of processes after each kill, reproducible"] = seen
