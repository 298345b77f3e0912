"""The last collectives of a rank, as torch's flight recorder has them."""

import json
import re

import pytest
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from stampede.engine.monitoring import flight_recorder
from stampede.engine.watchdog.last_words import _write_collectives
from support.ranks import run_ranks
from support.recorded import collectives_of_which_one_waits


def test_the_collective_that_a_rank_waits_in():
    waiting, late = (text.splitlines() for text in run_ranks(2, collectives_of_which_one_waits))
    assert waiting[0] == "last collectives, the newest last:"
    shown = r"  group \S+ collective (\d+): gloo:all_reduce of (.*), \d+\.\d s ago, (.*)"
    matches = [re.fullmatch(shown, line) for line in waiting[-2:]]
    assert [match.groups()[1:] for match in matches] == [
        ("2 x 3 Float", "done"),
        ("7 Double", "under way"),
    ]
    first, second = (int(match[1]) for match in matches)
    assert second == first + 1
    # All ranks number them alike.
    assert int(re.fullmatch(shown, late[-1])[1]) == second


@pytest.fixture
def files(tmp_path):
    return tmp_path / "hang_rank_0.txt", tmp_path / "flight_recorder/rank_0.json"


def test_all_collectives_are_in_a_file(files):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for _ in range(30):
            dist.barrier()
        _write_collectives(*files)
    finally:
        dist.destroy_process_group()
    assert files[0].read_text().count("gloo:barrier") == 20
    entries = json.loads(files[1].read_text())["gloo"]["entries"]
    assert sum(entry["profiling_name"] == "gloo:barrier" for entry in entries) >= 30


def test_a_torch_without_recorder(files, monkeypatch):
    monkeypatch.setattr(flight_recorder, "_DUMPS", {"gloo": "_absent"})
    _write_collectives(*files)
    assert "flight recorder has no collectives of this process" in files[0].read_text()


def test_a_recorder_that_is_another_one(files, monkeypatch):
    monkeypatch.setattr(c10d, "_dump_fr_trace_json", lambda *_: b'{"entries": [{"name": "x"}]}')
    _write_collectives(*files)
    assert "cannot be read (KeyError('time_created_ns'))" in files[0].read_text()
    # What it is can still be seen.
    assert json.loads(files[1].read_text())["gloo"]["entries"] == [{"name": "x"}]
