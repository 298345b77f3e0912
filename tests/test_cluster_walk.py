"""The page "On a cluster" of the manual, walked: a bucket, Spark, two hosts, one of them killed.

Its scores on Spark are those of test_on_spark.
"""

import sys

import polars as pl
import pytest

from support import forking
from support.forked import FORKED_TORCHRUN
from support.forking import server_of_tests
from support.monitored import logged
from support.movie_runs import JOB, prepare_movies
from support.movies import movies, write_movies
from support.object_store import BUCKET, USER
from support.paths import ROOT
from support.spark import missing
from support.two_hosts import two_hosts
from support.waiting import wait_for

if missing():
    pytest.skip(missing(), allow_module_level=True)
pytestmark = pytest.mark.slow

ROWS, EPOCHS = 6000, 6
# Its own master, and an executor in another process.
SPARK = "local-cluster[1,1,1024]"
SMALL = [one for one in JOB if not one.startswith(("data.", "train.epochs"))]
STAMPEDE = [*forking.PROGRAM, "-m", "stampede"]

PUT = """
import socket, sys, time, fsspec
while socket.socket().connect_ex((sys.argv[1], 5000)):
    time.sleep(0.1)
files = fsspec.filesystem("s3")
files.mkdir("clicks")
for name in sys.argv[2:]:
    files.put_file(name, "s3://clicks/days/" + name.rpartition("/")[2])
"""


@pytest.fixture
def hosts(tmp_path):
    with two_hosts(tmp_path) as hosts:
        yield hosts


def test_the_page(hosts, tmp_path):
    north, south = hosts.north, hosts.south
    folder, table = prepare_movies(tmp_path / "log"), movies(ROWS)
    days = [folder / f"day_{number}.csv" for number in range(2)]
    for number, day in enumerate(days):
        write_movies(day, table[number * ROWS // 2 : (number + 1) * ROWS // 2])
    new = write_movies(folder / "new.parquet", table[:500])

    # The same path on both hosts, but not the same place.
    place, of_south = tmp_path / "stores", tmp_path / "of_south"
    for one in (place, of_south):
        one.mkdir()
    given = {
        **USER, "AWS_ENDPOINT_URL": f"http://{north.address}:5000", "STAMPEDE_STORES": str(place),
        **server_of_tests(),
    }  # fmt: skip

    def start(host, *command, **more):
        mounts = {place: of_south} if host == south else {}
        return hosts.start(host, command, mounts, {**given, **more})

    def run(*command):
        """A command on the first host, to its end."""
        (done,) = hosts.end([start(north, *command)])
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    python = sys.executable
    # Its log would fill a pipe that nobody reads, and then it would wait for ever.
    quietly = ["sh", "-c", f'exec "$@" > {tmp_path}/moto.log 2>&1', "sh"]
    start(north, *quietly, python, "-m", "moto.server", "-H", north.address, "-p", "5000")
    run(python, "-c", PUT, north.address, *days)
    schema, prepared = ["--schema", folder / "schema.yaml"], ["--out", f"{BUCKET}/prepared"]
    prepare = ["prepare", "table", f"{BUCKET}/days/*.csv", *schema, *prepared, "--spark", SPARK]
    run(python, "-m", "stampede", *prepare)

    path = {"PATH": f"{bin_of_torchrun(tmp_path)}:/usr/sbin:/usr/bin:/bin"}
    # torchrun would wait 30 seconds for a host that is gone.
    path["PET_RDZV_CONF"] = "last_call_timeout=2"
    train = ["sh", ROOT / "examples/cluster/torchrun.sh", north.name]
    train += [ROOT / "examples/cluster/clicks.yaml", *SMALL]
    epochs = f"train.epochs={EPOCHS}"
    started = [start(host, *train, epochs, **path, NODES="1:2") for host in hosts]
    here = place / "runs/s3/clicks/runs/ads"
    assert wait_for((here / "checkpoints/epoch_0001/manifest.json").exists)
    south.kill()
    (done,) = hosts.end(started[:1])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "continuing after step " in done.stdout
    # It is back, and gets the checkpoint from the other.
    for done in hosts.end(
        [start(host, *train, f"train.epochs={EPOCHS + 1}", **path) for host in hosts]
    ):
        assert done.returncode == 0, done.stdout + done.stderr
    assert [o["world_size"] for o in logged(here) if o["event"] == "started"] == [2, 1, 2]
    assert not list(of_south.rglob("*.distcp"))

    scored = tmp_path / "scored.parquet"
    run(*STAMPEDE, "export", f"{BUCKET}/runs/ads", f"{BUCKET}/package")
    run(*STAMPEDE, "predict", f"{BUCKET}/runs/ads", new, scored)
    assert pl.read_parquet(scored)["score"].is_between(0, 1).sum() == 500


def bin_of_torchrun(folder):
    """A folder with a torchrun of the interpreter that runs the tests, which is forked."""
    place = folder / "bin"
    place.mkdir()
    (place / "torchrun").write_text(f'#!/bin/sh\nexec {" ".join(FORKED_TORCHRUN)} "$@"\n')
    (place / "torchrun").chmod(0o755)
    return place
