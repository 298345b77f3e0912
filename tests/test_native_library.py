"""Compiling the kernels once, not at all without a compiler, and for processors without AVX-512."""

import logging
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from stampede.native_library import Library, _key
from stampede.optim import CowClipAdam, native
from support.paths import ROOT
from support.ranks import run_ranks


def build(source, cache):
    """Whether a library is there, and what this process was told."""
    os.environ["TORCH_EXTENSIONS_DIR"] = str(cache)
    told = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    return Library(source).available(), "\n".join(told)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """What two processes are told that start at once with an empty cache."""
    folder = tmp_path_factory.mktemp("compiled")
    source = folder / "tiny.cpp"
    source.write_text("int tiny() { return 7; }")
    return source, folder / "cache", run_ranks(2, build, source, folder / "cache")


def libraries(cache):
    return list(Path(cache).rglob("tiny.so"))


@pytest.mark.slow
def test_one_of_two_processes_compiles_and_later_ones_find_it(compiled):
    source, cache, found = compiled
    assert [available for available, _ in found] == [True, True]
    assert sum("compiling" in told for _, told in found) == 1
    assert len(libraries(cache)) == 1
    assert run_ranks(1, build, source, cache) == [(True, "")]


def test_what_a_killed_compilation_left_is_no_obstacle(compiled, tmp_path):
    source, cache, _ = compiled
    folder = tmp_path / libraries(cache)[0].parent.relative_to(cache)
    (folder / "tmp_killed").mkdir(parents=True)
    (folder / "tmp_killed" / "lock").touch()
    (folder / "lock").touch()
    assert run_ranks(1, build, source, tmp_path)[0][0]
    assert libraries(tmp_path)


def train(cache=None, environment=()):
    """Whether the kernels are there, a sum of trained weights, and what this process was told."""
    os.environ.update(environment)
    told = build(Path(native.__file__).parent / "lookup.cpp", cache)[1] if cache else ""
    table = torch.nn.Embedding(50, 8, sparse=True)
    torch.nn.init.constant_(table.weight, 0.1)
    optimizer = CowClipAdam(table.parameters(), lr=1e-2, l2=1e-3)
    for step in range(3):
        table(torch.tensor([1, 1, step])).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return native.available(), table.weight.detach().double().sum().item(), told


@pytest.mark.parametrize(
    "environment, warns", [({"CXX": "/no/compiler"}, True), ({"STAMPEDE_NATIVE": "0"}, False)]
)
def test_without_the_kernels_plain_pytorch_does_the_same(tmp_path, environment, warns):
    ((available, total, told),) = run_ranks(1, train, tmp_path, environment)
    assert not available
    assert told.count("slower plain PyTorch does their work") == warns
    assert train()[:2] == (True, pytest.approx(total, rel=1e-6))
    assert not list(tmp_path.rglob("*.so"))


def test_double_precision_is_left_to_torch():
    assert native.handles(torch.zeros(2, 4))
    assert not native.handles(torch.zeros(2, 4, dtype=torch.float64))
    assert not native.handles(torch.zeros(4, 2).t())
    with native.switched_off():
        assert not native.handles(torch.zeros(2, 4))


def test_a_library_is_compiled_anew_when_any_of_its_files_changes(tmp_path):
    one, two = tmp_path / "one.cpp", tmp_path / "two.cpp"
    one.write_text("int one;")
    two.write_text("int two;")
    before = _key([one, two])
    assert _key([one, two]) == before
    two.write_text("int three;")
    assert _key([one, two]) != before


PROGRAM = """
import sys
from pathlib import Path
import pytest
from torch.utils import cpp_extension
from stampede import native_library
native_library._FLAGS.append("-mno-avx512f")
load = cpp_extension.load
def load_as_one_file(name, sources, build_directory, **options):
    # torch's headers take longest, which each file includes.
    whole = Path(build_directory, "whole.cpp")
    whole.write_text("".join(f'#include "{source}"\\n' for source in sources))
    load(name, [str(whole)], build_directory=build_directory, **options)
cpp_extension.load = load_as_one_file
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-n", "0", "-m", "", *sys.argv[1:]]))
"""


@pytest.mark.wide
@pytest.mark.skipif(platform.machine() != "x86_64", reason="a processor that has them never")
def test_they_pass_the_same_tests():
    # Those of the sources that ask for the instructions: waiting_rows.cpp, lanes.h, products.cpp.
    tests = (
        "tests/optim/test_cpu_kernels.py::test_the_number_of_threads_changes_no_bit_of_a_replay",
        "tests/optim/test_cpu_kernels.py::test_replays_steps",
        "tests/models/cpu/test_products.py",
        "tests/models/cpu/test_dense_layers.py::test_relu_layers",
        "tests/models/cpu/test_orders.py::test_against_float64",
    )
    # Not what the test run that this one is part of was told.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *tests],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
