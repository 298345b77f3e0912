"""A network that torch.compile takes over trains as the plain one."""

import os
import subprocess
import sys

import pytest
import torch
from torch._dynamo.utils import counters

from stampede.engine.precision import compile_network
from stampede.settings import SettingsError
from support.jobs import SMALL, run_small, small_config, train_an_epoch
from support.paths import ROOT
from support.waiting import HANG

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _afresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def test_it_trains_to_the_same(tmp_path):
    plain = train_an_epoch(small_config(tmp_path))
    assert not counters["stats"]["calls_captured"]
    compiled = train_an_epoch(small_config(tmp_path, "train.compile=default"))
    assert counters["stats"]["calls_captured"] > 0
    assert compiled.losses == pytest.approx(plain.losses, rel=1e-4)
    assert compiled.evaluation.logloss == pytest.approx(plain.evaluation.logloss, rel=1e-4)


def test_a_run_may_go_on_compiled(tmp_path):
    run_small(tmp_path, ["train.epochs=1"])
    again = ["train.epochs=2", "checkpoint.resume=auto", "train.compile=default"]
    run_small(tmp_path, again)
    assert counters["stats"]["calls_captured"] > 0


def test_cuda_graphs_are_for_gpus(tmp_path):
    with pytest.raises(SettingsError, match=r"train.compile: found 'cuda_graphs'.* write "):
        run_small(tmp_path, ["train.compile=cuda_graphs"])


@pytest.mark.parametrize(
    "overrides, why",
    [
        (["run.device=cpu"], "run.device is 'cpu'"),
        (["optim.embedding.optimizer=helen"], "a step of .*'helen' has two passes"),
    ],
)
def test_impossible_cuda_graphs_are_refused_before_data_are_read(tmp_path, overrides, why):
    with pytest.raises(SettingsError, match=f"train.compile: found 'cuda_graphs', but {why}"):
        small_config(tmp_path, "train.compile=cuda_graphs", *overrides)


def test_without_a_compiler_it_says_what_to_write(tmp_path):
    (tmp_path / "small.yaml").write_text("")
    overrides = [*SMALL, "train.compile=default"]
    done = subprocess.run(
        [sys.executable, ROOT / "launch.py", "small.yaml", *overrides],
        cwd=tmp_path,
        env={**os.environ, "CXX": "/nonexistent", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=HANG,
    )
    assert done.returncode == 1
    assert "error: torch.compile failed (" in done.stderr
    assert "write train.compile=none" in done.stderr and "Traceback" not in done.stderr


def test_how_the_network_is_compiled_for_a_gpu():
    asked = {}

    class Network(torch.nn.Module):
        def compile(self, **options):
            asked.update(options)

    compile_network(Network(), "cuda_graphs", torch.device("cuda"))
    assert asked == {"dynamic": False, "mode": "reduce-overhead"}
