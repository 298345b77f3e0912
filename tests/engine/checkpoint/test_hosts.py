"""Checkpoints between hosts that share no folder."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stampede.data.prepared.manifest import MANIFEST
from stampede.engine.checkpoint import hosts
from stampede.engine.processes import processes
from stampede.engine.results.run_folder import RunFolder
from stampede.files import file_entry
from support.ranks import run_ranks

pytestmark = pytest.mark.slow

# Of rank 0 to 3, two a host; other lengths than multiples of a piece, too, and none.
SIZES = (5, 3000, 2000, 2001)
PIECE = 1000


def content(rank):
    return np.random.default_rng(rank).bytes(SIZES[rank])


def on_its_host(folder, disks=(0, 0, 1, 1)):
    """Go to the folder of a rank's disk, whose relative paths no other disk has."""
    rank = int(os.environ["RANK"])
    os.environ["STAMPEDE_STORES"] = "stores"
    hosts._PIECE = PIECE
    here = folder / str(disks[rank])
    here.mkdir(exist_ok=True)
    os.chdir(here)
    return rank


def gathered(folder, full):
    rank, place = on_its_host(folder), Path("checkpoint")
    place.mkdir(exist_ok=True)
    (place / f"of_{rank}").write_bytes(content(rank))
    if full and rank == 0:
        (place / "of_3").symlink_to("/dev/full")
    with processes("cpu") as here:
        names, synced, real = [f"of_{rank}"], [], os.fsync
        os.fsync = lambda n: (synced.append(Path(f"/proc/self/fd/{n}").readlink().name), real(n))
        entries = hosts.together(lambda: [file_entry(place / n, place) for n in names], here.group)
        try:
            hosts.gather_files(place, entries, here)
        except OSError as failure:
            return failure.strerror
        assert set(synced) == ({f"of_{other}" for other in (2, 3)} if rank == 0 else set())
    return {path.name: path.read_bytes() for path in place.iterdir()}


def test_the_host_of_rank_0_gets_all_files(tmp_path):
    found = run_ranks(4, gathered, tmp_path, False, ranks_per_node=2)
    assert found[0] == {f"of_{rank}": content(rank) for rank in range(4)}
    assert found[3] == {f"of_{rank}": content(rank) for rank in (2, 3)}


def test_a_full_disk_fails_on_all_ranks(tmp_path):
    assert run_ranks(4, gathered, tmp_path, True, ranks_per_node=2) == 4 * [
        "No space left on device"
    ]


def spread(folder, has_another):
    rank, place = on_its_host(folder), Path("checkpoint")
    if rank == 0:
        (place / "learned").mkdir(parents=True)
        for name, size in {MANIFEST: 4, "learned/a": 0, "learned/b": 3500}.items():
            (place / name).write_bytes(np.random.default_rng(size).bytes(size))
    if rank == 2 and has_another:
        place.mkdir()
        (place / MANIFEST).write_text("another")
    with processes("cpu") as here:
        with hosts.on_every_host(place, here) as copy:
            files = [path for path in copy.rglob("*") if path.is_file()]
            found = {str(path.relative_to(copy)): path.read_bytes() for path in files}
        assert (copy != place) == (rank >= 2)
        # The rank that made it has deleted it.
        assert rank != 2 or not copy.exists()
        # Of one host.
        alone = replace(here, world_size=here.local_world_size)
        with hosts.on_every_host(place, alone) as same:
            assert same == place
    return found


# With one rank a host, two other hosts share a disk.
@pytest.mark.wide
@pytest.mark.parametrize("per_host", [1, 2])
@pytest.mark.parametrize("has_another", [False, True])
def test_other_hosts_have_a_copy_for_a_while(tmp_path, has_another, per_host):
    found = run_ranks(4, spread, tmp_path, has_another, ranks_per_node=per_host)
    assert found[0] == found[1] == found[2] == found[3]
    assert {name: len(data) for name, data in found[3].items()} == {
        MANIFEST: 4, "learned/a": 0, "learned/b": 3500,
    }  # fmt: skip


def working_folder(folder, disks):
    on_its_host(folder, disks)
    run = RunFolder("s3://clicks/runs/ads")
    run.path.parent.mkdir(parents=True, exist_ok=True)
    with processes("cpu") as here:
        run.check_shared(here)
        return run.apart, str(run.path.absolute().relative_to(folder))


@pytest.mark.parametrize("disks", [(0, 0, 1), (0, 1, 1), (0, 1, 0), (0, 1, 2)])
def test_each_host_works_in_a_folder_of_its_own_if_one_shares_none(tmp_path, disks):
    found = run_ranks(3, working_folder, tmp_path, disks, ranks_per_node=1)
    names = ("ads", ".ads.host_1", ".ads.host_2")
    assert found == [
        (True, f"{disk}/stores/runs/s3/clicks/runs/{name}")
        for disk, name in zip(disks, names, strict=True)
    ]


def test_hosts_that_all_share_a_folder_work_in_it(tmp_path):
    found = run_ranks(3, working_folder, tmp_path, (0, 0, 0), ranks_per_node=1)
    assert found == 3 * [(False, "0/stores/runs/s3/clicks/runs/ads")]
