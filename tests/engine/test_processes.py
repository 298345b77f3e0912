"""How processes start: they find each other, continue what they began, keep freed memory."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from stampede.engine.errors import RunFolderError, TrainingStoppedError
from stampede.engine.processes import agree_on_name, connection, processes
from stampede.engine.results.run_folder import RunFolder
from stampede.engine.start_up import stay_on_this_machine
from support.jobs import run_small, small_config
from support.paths import ROOT
from support.ranks import run_ranks
from support.waiting import HANG


def test_each_start_gets_a_new_name():
    """The store keeps what processes have written that are gone, some before they had joined."""
    store, names = dist.HashStore(), []
    for other in (1, 2):
        store.set(f"stampede/rendezvous/hello/{other}", "of a process that is gone")
    for ranks in ((1, 0, 2), (0, 1, 2)):
        with ThreadPoolExecutor(3) as pool:
            found = set(pool.map(lambda rank: agree_on_name(store, rank, 3, 20), ranks))
        assert len(found) == 1
        names += found
    assert names[0] != names[1]


def test_runs_treat_denormal_numbers_as_zero():
    """Products of weights that decay are so small: dense layers became 14 times slower."""

    def smallest():
        return float((torch.full((1 << 20,), 1e-20) * 1e-20).max())

    with processes("cpu"):
        assert smallest() == 0
    assert 0 < smallest() < 1.2e-38


def test_processes_that_do_not_join_are_named():
    with pytest.raises(TrainingStoppedError, match="of 3 processes ranks 1, 2 have not joined"):
        agree_on_name(dist.HashStore(), 0, 3, 0.05)


def test_a_restart_continues_what_the_same_torchrun_began(tmp_path, monkeypatch):
    def start(torchrun, attempt, *overrides):
        name = f"{tmp_path}/torchelastic_{torchrun}/none_{torchrun}/attempt_{attempt}/0/error.json"
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", name if torchrun else "")
        config = small_config(tmp_path, *overrides)
        with RunFolder(tmp_path / "small") as folder:
            continued = folder.reserve(config)
            folder.claim(config)
        (tmp_path / "small/checkpoints/epoch_0001").mkdir(exist_ok=True)
        return continued

    # Another run is there, whose torchrun is gone. A mistake remains one, however often torchrun
    # starts again.
    start("", 0)
    for attempt in range(2):
        with pytest.raises(RunFolderError, match="exists; write"):
            start("a", attempt)
    starts = [("a", 0), ("a", 1), ("b", 0)]
    assert [start(*which, "run.overwrite=true") for which in starts] == [False, True, False]


@pytest.mark.wide
def test_too_few_files_are_not_blamed_on_another_rank():
    program = (
        "import resource, sys\n"
        "from stampede.engine.exit_status import exit_status\n"
        "from stampede.engine.processes import processes\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (6, 6))\n"
        "sys.exit(exit_status(lambda: processes('cpu').__enter__()))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("error: this process may open only 6 files; write ulimit")


def listening():
    """The addresses where this rank listens."""
    stay_on_this_machine()
    # Where the machine's own name is of the loopback, gloo would listen there anyway.
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    with processes("cpu") as rank:
        store = connection()
        store.set(f"rank {rank.rank}", "is here")
        store.wait(["rank 0", "rank 1"], timedelta(seconds=HANG))
        here = Path("/proc/self")
        own = {os.readlink(file) for file in here.glob("fd/*") if file.is_symlink()}
        lines = [
            line.split()
            for kind in ("tcp", "tcp6")
            for line in (here / "net" / kind).read_text().splitlines()[1:]
        ]
        return [line[1] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in own]


@pytest.mark.slow
def test_ranks_of_one_machine_listen_on_its_loopback_only():
    addresses = [address for found in run_ranks(2, listening) for address in found]
    # gloo's own: 127.0.0.1 as the kernel writes it.
    assert len(addresses) >= 2
    assert {address.partition(":")[0] for address in addresses} == {"0100007F"}


# Page faults of a block that is taken again and again.
FAULTS = """
import resource, sys
from stampede.engine.start_up import keep_freed_memory
keep_freed_memory()
assert "torch" not in sys.modules
import torch
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def use():
    torch.ones(1 << 24)
use()
before = faults()
for _ in range(4):
    use()
print(faults() - before)
"""
# Of 64 MB. Huge ones take 32 faults, where the system has them.
PAGES = (1 << 26) // 4096


# Of every other block of a megabyte that was freed, what is still there, in blocks.
PIECES = """
import ctypes
from stampede.engine.start_up import give_back_freed_memory, keep_freed_memory
keep_freed_memory()
def held():
    (line,) = (one for one in open("/proc/self/status") if one.startswith("RssAnon"))
    return int(line.split()[1]) / 1024
c = ctypes.CDLL(None)
c.malloc.restype, c.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
before = held()
blocks = [c.malloc(1 << 20) for _ in range(100)]
for block in blocks:
    ctypes.memset(block, 1, 1 << 20)
for block in blocks[::2]:
    c.free(block)
assert held() - before > 90
give_back_freed_memory()
print(round(held() - before))
"""


# Ways in which one product ends, by where its factors lie.
PRODUCTS = """
import torch
torch.set_num_threads(1)
rows, weight = torch.randn(21, 33), torch.randn(7, 33)
found = set()
for at in range(16):
    moved = torch.empty(rows.numel() + at)[at:].view_as(rows).copy_(rows)
    for other in range(16):
        factor = torch.empty(weight.numel() + other)[other:].view_as(weight).copy_(weight)
        found.add((moved @ factor.t()).numpy().tobytes())
print(len(found))
"""


# A command that has imported all that it needs, before it fails.
BEFORE = {
    "train": ["{empty}", "data.kind=prepared", "data.path={folder}", "train.reproducible=true"],
    "incremental": ["{empty}", "data.kind=criteo_kaggle", "data.path=x", "train.reproducible=true"],
    "predict": ["{folder}", "clicks.csv", "scores.csv"],
}


@pytest.mark.wide
@pytest.mark.parametrize("command", BEFORE)
def test_products_have_the_same_bits_wherever_their_factors_lie(tmp_path, command):
    (tmp_path / "empty.yaml").write_text("")
    given = [one.format(empty=tmp_path / "empty.yaml", folder=tmp_path) for one in BEFORE[command]]
    begun = f"import sys; from stampede.engine.cli import stampede; stampede({[command, *given]})"
    program = f"{begun}; assert 'torchrec' in sys.modules\n{PRODUCTS}"
    kept = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    said = subprocess.check_output([sys.executable, "-c", program], cwd=ROOT, env=kept)
    assert int(said.split()[-1]) == 1


@pytest.mark.skipif(not os.confstr("CS_GNU_LIBC_VERSION"), reason="not glibc")
def test_what_is_kept_goes_back_to_the_system():
    assert printed(PIECES) < 60
    assert printed(PIECES, MALLOC_MMAP_MAX_="0") > 90


@pytest.mark.slow
def test_a_run_gives_it_back_from_time_to_time(tmp_path, monkeypatch):
    given, place = [], "stampede.engine.training.trainer"
    monkeypatch.setattr(f"{place}.give_back_freed_memory", lambda: given.append(1))
    for seconds, times in ((60.0, 0), (0.0, 8)):
        monkeypatch.setattr(f"{place}._SECONDS_OF_KEPT_MEMORY", seconds)
        run_small(tmp_path, ["run.overwrite=true"])
        assert len(given) == times


HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def printed(program, **environment):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "THP_", "GLIBC_"))}
    command = [sys.executable, "-c", program]
    return int(subprocess.check_output(command, cwd=ROOT, env={**kept, **environment}))


@pytest.mark.wide
@pytest.mark.skipif(
    not HUGE.exists() or "[always]" in HUGE.read_text() or not os.confstr("CS_GNU_LIBC_VERSION"),
    reason="not glibc, or all pages are huge anyway",
)
def test_a_block_that_was_freed_needs_no_new_pages():
    assert printed(FAULTS) < PAGES / 2
    # What the environment says stays, and costs pages.
    own = {"MALLOC_MMAP_THRESHOLD_": "65536", "THP_MEM_ALLOC_ENABLE": "0"}
    assert printed(FAULTS, **own) > 2 * PAGES
    launched = "import launch, os; launch.main(['absent.yaml'])"
    assert printed(f"{launched}; print(os.environ['THP_MEM_ALLOC_ENABLE'])") == 1
