"""Runs that are killed at random moments end as if nothing had been.

`make soak` kills a hundred times, `make slow` in each stage once.
"""

from random import Random

import pytest

from support.jobs import SMALL
from support.soak import (
    STAGES,
    Launched,
    killed_runs,
    killed_workers,
    random_moment,
    same_end,
    table,
    write_results,
)
from support.stopping import undisturbed_runs

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


@pytest.mark.slow
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
