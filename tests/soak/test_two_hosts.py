"""Two hosts train together as one host does, and end or go on when one of them disappears.

The hosts are network namespaces of this machine, so these tests need root.
"""

import pickle
from functools import partial

import pytest

from support.jobs import SMALL, lines, run_small, same_end
from support.monitored import logged
from support.paths import ROOT
from support.ranks import run_ranks
from support.reading import OVERRIDES, prepared
from support.soak import at_step
from support.stopping import undisturbed_runs
from support.two_hosts import (
    at_beat,
    disappear,
    in_save,
    seconds_until_ended,
    slow_steps,
    two_hosts,
    wrong_clock,
)
from support.waiting import wait_for

pytestmark = [pytest.mark.soak, pytest.mark.slow]

# 8 steps an epoch.
LONG = ["train.epochs=2", "evaluate.every=3", "checkpoint.every_steps=3", "train.reproducible=true"]
JOB = (*SMALL, *LONG)
# Seconds; far more than a step takes.
PATIENCE = 10


@pytest.fixture
def hosts(tmp_path):
    (tmp_path / "small.yaml").write_text("")
    with two_hosts(tmp_path) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Runs of one host that nothing happened to, by number of ranks and further overrides."""
    return undisturbed_runs(tmp_path_factory, LONG)


def start(
    hosts, *overrides, job=(*SMALL, *JOB), disturbances=(), on_south=(), mounts=(), **options
):
    """The launcher on both hosts.

    Args:
        job: overrides before the others.
        disturbances: each a rank, numbers of its starts, from 0, and what makes a context.
        on_south: overrides of the second host alone.
        mounts: its own mounts.
    """
    folder = hosts.folder
    (folder / "disturbances").write_bytes(pickle.dumps(disturbances))
    given = [folder / "disturbances", folder / "small.yaml", f"run.dir={folder / 'runs'}"]
    given += [*job, *overrides]
    program = ROOT / "tests/support/soak.py"
    return [
        hosts.torchrun(hosts.north, program, given, **options),
        hosts.torchrun(hosts.south, program, [*given, *on_south], mounts=mounts, **options),
    ]


def train(hosts, *overrides, **more):
    """A run of both to its end."""
    done = hosts.end(start(hosts, *overrides, **more))
    assert [one.returncode for one in done] == [0, 0], "\n".join(one.stderr for one in done)
    return hosts.folder / "runs/small"


def refused(hosts, *overrides, **more):
    """What the hosts say of a run that they refuse before its first step."""
    done = hosts.end(start(hosts, *overrides, **more))
    said = "".join(one.stderr for one in done)
    assert all(one.returncode for one in done)
    assert "exitcode  : 2" in said and said.count("error: ") == 1 and "training:" not in said
    assert not (hosts.folder / "runs/small/metrics.jsonl").exists()
    return next(line for line in said.splitlines() if line.startswith("error: "))


@pytest.mark.parametrize("plan", ["table_wise", "row_wise"])
def test_the_same_bits_as_one_process(hosts, undisturbed, plan):
    same_end(train(hosts, f"sharding.plan={plan}"), undisturbed(1))


@pytest.mark.parametrize("plan, ranks", [
    ("data_parallel", 1), ("column_wise", 1), ("table_row_wise", 2), ("grid_shard", 2),
])  # fmt: skip
def test_the_same_bits_as_one_host(hosts, tmp_path, plan, ranks):
    """As many processes on one host: their number decides the bits."""
    given = ["train.reproducible=false", f"sharding.plan={plan}"]
    alone = tmp_path / "alone"
    alone.mkdir()
    run_ranks(2 * ranks, run_small, alone, [*LONG, *given], 2 * ranks, ranks_per_node=ranks)
    run = train(hosts, *given, ranks=ranks)
    same_end(run, alone / "small")
    assert {logged(run, rank)[0]["host"] for rank in range(2 * ranks)} == {"north", "south"}


def test_a_wrong_clock_does_not_matter(hosts, undisturbed):
    yesterday = (1, range(1), partial(wrong_clock, -86400.0))
    same_end(train(hosts, disturbances=[yesterday]), undisturbed(1))


IN = {
    "preparation": lambda action: partial(at_beat, "preparing data", 1, action),
    "step": lambda action: partial(at_step, 7, action),
    "evaluation": lambda action: partial(at_beat, "evaluating", 4, action),
    "save": lambda action: partial(in_save, 2, action),
}


@pytest.mark.parametrize("within, overrides", [
    ("preparation", ()), ("step", ()), ("evaluation", ()), ("save", ()),
    ("save", ("checkpoint.asynchronous=false",)),
])  # fmt: skip
@pytest.mark.parametrize("how", ["cut", "kill"])
def test_all_end_when_a_host_disappears(hosts, how, within, overrides):
    note = hosts.folder / "note"
    fault = IN[within](partial(disappear, how, hosts.south, note))
    given = [f"run.hang_seconds={PATIENCE}", *overrides]
    started = start(hosts, *given, disturbances=[(1, range(1), fault)])
    assert wait_for(note.exists)
    since, run = float(note.read_text()), hosts.folder / "runs/small"
    workers = [pid for host in hosts for pid in host.workers()]
    assert len(workers) == 2 or how == "kill"
    for pid in workers:
        # They also write the stacks of their threads, and wait for each other to do so.
        assert seconds_until_ended(pid, since) < 2 * PATIENCE
    # torchrun itself does not end on a host that is cut off from its store.
    assert wait_for(lambda: started[0].poll() is not None)
    for host in hosts:
        host.kill()
    said = [one.stderr for one in hosts.end(started)]
    assert all("Traceback" not in one.partition("torch/distributed/elastic")[0] for one in said)
    if how == "kill":
        assert "error: the connection to another rank is lost" in said[0] and "10.77.0.2" in said[0]
        return
    for one in said:
        assert f"After run.hang_seconds={PATIENCE} its processes end with status 3" in one
    assert "error: the run hangs: rank 1 on south is stopped, dead or out of reach, or " in said[0]
    assert "error: the run hangs: rank 1 on south waits at step " in said[1]
    assert " for north, and torchrun's store at " in said[1]
    if within != "preparation":
        assert (run / "hang_rank_0.txt").exists() and (run / "hang_rank_1.txt").exists()


def test_the_second_host_ends_when_the_first_is_killed(hosts):
    """With it torchrun's store and rank 0 are gone."""
    note = hosts.folder / "note"
    fault = IN["step"](partial(disappear, "kill", hosts.north, note))
    started = start(hosts, f"run.hang_seconds={PATIENCE}", disturbances=[(0, range(1), fault)])
    assert wait_for(note.exists)
    pid = logged(hosts.folder / "runs/small", 1)[0]["process"]
    assert seconds_until_ended(pid, float(note.read_text())) < 2 * PATIENCE
    said = hosts.end(started)[1].stderr
    assert "error on rank 1: the connection to another rank is lost" in said and "10.77.0.1" in said


@pytest.mark.parametrize("how", ["cut", "kill"])
def test_the_host_that_is_left_goes_on(hosts, undisturbed, how):
    fault = partial(at_step, 7, partial(disappear, how, hosts.south, hosts.folder / "note"))
    started = start(
        hosts, f"run.hang_seconds={PATIENCE}", "checkpoint.resume=auto",
        disturbances=[(1, range(1), fault)], nodes="1:2", restarts=2,
    )  # fmt: skip
    (done,) = hosts.end(started[:1])
    assert done.returncode == 0, done.stderr
    assert "continuing after step 6 from" in done.stdout or "after step 3 from" in done.stdout
    run = hosts.folder / "runs/small"
    same_end(run, undisturbed(1))
    assert [line["world_size"] for line in logged(run) if line["event"] == "started"] == [2, 1]


def test_a_run_folder_of_each_host_is_refused(hosts):
    for name in ("runs", "own"):
        (hosts.folder / name).mkdir()
    said = refused(hosts, mounts={hosts.folder / "runs": hosts.folder / "own"})
    assert "on south: " in said and "is not the folder that north, the host of rank 0, has" in said
    assert "mount one folder on all hosts at the same place" in said


def test_another_configuration_is_refused(hosts):
    said = refused(hosts, on_south=["optim.dense.lr=2e-3"])
    assert "optim.dense.lr: found 0.002 for rank 1 on south, and 0.001 for rank 0 on north" in said


def test_another_version_is_refused(hosts):
    file, changed = ROOT / "optim/rules.py", hosts.folder / "rules.py"
    changed.write_text(file.read_text() + "# changed\n")
    said = refused(hosts, mounts={file: changed})
    assert "the source of stampede is " in said and "for rank 1 on south" in said


@pytest.mark.parametrize("there", ["other", "none"])
def test_other_data_are_refused(hosts, there):
    data = prepared(hosts.folder / "data", train=700)
    other = hosts.folder / "other"
    other.mkdir() if there == "none" else prepared(other, train=701)
    given = ["data.kind=prepared", f"data.path={data}"]
    said = refused(hosts, *given, job=OVERRIDES, mounts={data: other})
    assert f"on south: {data}: " in said and "on north, the host of rank 0; mount one" in said


def test_a_slow_host_is_named(hosts):
    slow = (1, range(1), partial(slow_steps, 0.5))
    (done, _) = hosts.end(start(hosts, "train.timing_every=4", disturbances=[slow]))
    assert done.returncode == 0, done.stderr
    timing = [one for one in lines(hosts.folder / "runs/small") if one["kind"] == "timing"]
    assert timing[-1]["slowest_seconds"]["rank"] == 1
    assert "slowest rank 1 on south: " in done.stdout + done.stderr
