"""Compiling the kernels: once, by one process, and not at all where there is no compiler."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support.waiting import HANG

pytestmark = pytest.mark.slow

TRAIN = """
import logging, sys, torch
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
from stampede.optim import CowClipAdam, native
table = torch.nn.Embedding(50, 8, sparse=True)
torch.nn.init.constant_(table.weight, 0.1)
optimizer = CowClipAdam(table.parameters(), lr=1e-2, l2=1e-3)
for step in range(3):
    table(torch.tensor([1, 1, step])).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print(native.available(), table.weight.detach().double().sum().item())
"""


def start(cache, **environment):
    return subprocess.Popen(
        [sys.executable, "-c", TRAIN],
        env={**os.environ, "TORCH_EXTENSIONS_DIR": str(cache), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    out, err = process.communicate(timeout=HANG)
    assert process.returncode == 0, err
    available, total = out.split()
    return available == "True", float(total), err


def libraries(cache):
    return list(Path(cache).rglob("rows.so"))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Two processes that start at once with an empty cache."""
    cache = tmp_path_factory.mktemp("cache")
    return cache, [finish(process) for process in [start(cache), start(cache)]]


def test_one_of_two_processes_compiles(compiled):
    cache, found = compiled
    assert [available for available, _, _ in found] == [True, True]
    assert sum("compiling" in err for _, _, err in found) == 1
    assert len(libraries(cache)) == 1


def test_a_compiled_library_is_found_again(compiled):
    cache, (first, _) = compiled
    available, total, err = finish(start(cache))
    assert available
    assert total == first[1]
    assert "compiling" not in err


def test_what_a_killed_compilation_left_is_no_obstacle(compiled, tmp_path):
    folder = libraries(compiled[0])[0].parent.relative_to(compiled[0])
    (tmp_path / folder / "tmp_killed").mkdir(parents=True)
    (tmp_path / folder / "tmp_killed" / "lock").touch()
    (tmp_path / folder / "lock").touch()
    assert finish(start(tmp_path))[0]
    assert libraries(tmp_path)


@pytest.mark.parametrize(
    "environment, warns", [({"CXX": "/no/compiler"}, True), ({"STAMPEDE_NATIVE": "0"}, False)]
)
def test_without_the_kernels_plain_pytorch_does_the_same(compiled, tmp_path, environment, warns):
    available, total, err = finish(start(tmp_path, **environment))
    assert not available
    assert err.count("slower plain PyTorch does their work") == warns
    assert total == pytest.approx(compiled[1][0][1], rel=1e-6)
    assert not libraries(tmp_path)


def test_double_precision_is_left_to_torch():
    from stampede.optim import native

    assert native.handles(torch.zeros(2, 4))
    assert not native.handles(torch.zeros(2, 4, dtype=torch.float64))
    assert not native.handles(torch.zeros(4, 2).t())
    with native.switched_off():
        assert not native.handles(torch.zeros(2, 4))


def test_a_library_is_compiled_anew_when_any_of_its_files_changes(tmp_path):
    from stampede.native_library import _key

    one, two = tmp_path / "one.cpp", tmp_path / "two.cpp"
    one.write_text("int one;")
    two.write_text("int two;")
    before = _key([one, two])
    assert _key([one, two]) == before
    two.write_text("int three;")
    assert _key([one, two]) != before
