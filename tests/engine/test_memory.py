"""Memory that a process may use, by the files in which Linux says so."""

import os

import pytest

from stampede.engine import memory

GB = 1 << 30
_OF = {
    1: ("4:memory:/job/step", "sys/fs/cgroup/memory", "memory.limit_in_bytes",
        "memory.usage_in_bytes", "total_", str(2**63 - 4096)),
    2: ("0::/job/step", "sys/fs/cgroup", "memory.max", "memory.current", "", "max"),
}  # fmt: skip


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("job, step, limit, free", [
    (8, None, 8, 5.5), (None, 8, 8, 5.5), (8, 4, 4, 1.5), (None, None, None, 20), (2, None, 2, 0),
])  # fmt: skip
def test_a_limit_of_the_group_or_of_one_above_counts(
    tmp_path, monkeypatch, version, job, step, limit, free
):
    """Of 3 GB used, half a GB only caches files."""
    monkeypatch.setattr(memory, "_ROOT", tmp_path)
    entry, mount, at_most, used, prefix, none = _OF[version]
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(f"9:cpu:/other\n{entry}\n")
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable: {20 * GB // 1024} kB\n")
    for name, gb in (("job", job), ("job/step", step)):
        folder = tmp_path / mount / name
        folder.mkdir(parents=True)
        (folder / at_most).write_text(none if gb is None else str(gb * GB))
        (folder / used).write_text(str(3 * GB))
        cached = f"{prefix}active_file {GB // 4}\n{prefix}inactive_file {GB // 4}\n"
        (folder / "memory.stat").write_text(f"cache 7\n{cached}")
    assert memory.free_memory() == free * GB
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert memory.memory_limit() == (machine if limit is None else limit * GB)


def test_outside_of_groups_it_is_the_machines(tmp_path, monkeypatch):
    machine = memory.memory_limit()
    monkeypatch.setattr(memory, "_ROOT", tmp_path)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 12 kB\n")
    assert memory.free_memory() == 12 * 1024
    assert memory.memory_limit() >= machine
