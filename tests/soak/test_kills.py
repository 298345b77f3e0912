"""Runs that are killed at random moments end as if nothing had been.

`make soak` kills a hundred times, `make slow` in each stage once.
"""

from random import Random

import pytest

from support.jobs import SMALL
from support.soak.killing import (
    STAGES,
    killed_run,
    killed_trees,
    killed_workers,
    random_moment,
    table,
)
from support.soak.launching import Worker
from support.soak.runs import same_end, write_results
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


def moments(draw, count, seconds):
    """So many random moments, of all stages alike; the first four are one of each."""
    stages = draw.sample(STAGES, len(STAGES))
    while len(stages) < count:
        stages += draw.sample(ROUND, len(ROUND))
    return [random_moment(draw, stage, seconds) for stage in stages[:count]]


def check(name, found, soaked):
    """The promise, and that kills fell where they were to."""
    seen = table(found)
    assert seen["steps done again at most"] <= 2 * EVERY
    assert all(seen[stage] >= len(found) // 12 for stage in STAGES), seen
    assert seen["save"] and seen["evaluation"], seen
    if soaked:
        RESULTS[name] = seen


def arguments(folder, *overrides):
    folder.mkdir(exist_ok=True)
    (folder / "small.yaml").write_text("")
    return [folder / "small.yaml", f"run.dir={folder}", *SMALL, *LONG, *overrides]


@pytest.mark.slow
@pytest.mark.parametrize("count", [len(STAGES), pytest.param(60, marks=pytest.mark.soak)])
def test_one_process(tmp_path, undisturbed, count):
    draw, worker = Random(count), Worker(tmp_path / "worker")
    worker.start(arguments(tmp_path / "undisturbed"))
    seconds = worker.end(HANG).seconds
    same_end(tmp_path / "undisturbed/small", undisturbed(1))

    def kill(folder, moments):
        goes_on = arguments(folder, "checkpoint.resume=auto")
        return killed_run(worker, goes_on, folder / "small", moments)

    found = in_rounds(tmp_path, undisturbed(1), kill, moments(draw, count, seconds))
    worker.kill()
    check("one process", found, count > len(STAGES))


@pytest.mark.soak
@pytest.mark.parametrize("ranks, count", [(2, 12), (4, 6)])
@pytest.mark.parametrize("what", ["a worker", "everything"])
def test_under_torchrun(tmp_path, undisturbed, ranks, count, what):
    draw = Random(ranks)

    def kill(folder, moments):
        run, said = folder / "small", tmp_path / "torchrun"
        if what == "a worker":
            return killed_workers(said, arguments(folder), run, ranks, moments)
        goes_on = arguments(folder, "checkpoint.resume=auto")
        return killed_trees(said, goes_on, run, [ranks], moments)

    left = [(draw.randrange(ranks), moment) for moment in moments(draw, count, 4)]
    found = in_rounds(tmp_path, undisturbed(ranks), kill, left)
    check(f"{ranks} processes of torchrun, {what} killed", found, True)


@pytest.mark.soak
def test_other_ranks_go_on(tmp_path, tmp_path_factory):
    reproducible = "train.reproducible=true"
    alone = undisturbed_runs(tmp_path_factory, [*LONG, reproducible])(1)
    draw = Random(8)

    def kill(folder, moments):
        goes_on = arguments(folder, "checkpoint.resume=auto", reproducible)
        return killed_trees(tmp_path / "torchrun", goes_on, folder / "small", RANKS, moments)

    left = [(draw.randrange(4), moment) for moment in moments(draw, 12, 4)]
    found = in_rounds(tmp_path, alone, kill, left)
    check("another number of processes after each kill, reproducible", found, True)


def in_rounds(folder, undisturbed, kill, left):
    """Runs that are killed some times each, until all moments have come; the kills."""
    found = []
    for number in range(3 * len(left)):
        kills = kill(folder / f"run_{number}", left[: len(ROUND)])
        same_end(folder / f"run_{number}/small", undisturbed)
        # One that has not come within a whole run is tried again later, and comes sooner: the
        # machine may have been slower when the run's length was measured.
        left = left[len(kills) :] if kills else [*left[1:], left[0].sooner()]
        found += kills
        if not left:
            return found
    raise AssertionError(f"{left} have not come")
