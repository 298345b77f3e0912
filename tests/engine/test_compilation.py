"""A network that torch.compile takes over trains as the plain one."""

import pytest
import torch
import torch._inductor.config
from torch._dynamo.utils import counters

from stampede.engine.errors import exit_status
from stampede.engine.job import compile_network
from stampede.settings import SettingsError
from support.jobs import lines, run_small, small_config

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _afresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def test_a_run_goes_on_compiled_to_the_same(tmp_path):
    # All batches of a part are of one size: each size is compiled anew.
    alike = [
        *("data.rows=512", "data.test_rows=256", "data.validation_fraction=0"),
        *("evaluate.select_on=test", "train.log_every=1", "checkpoint.resume=auto"),
    ]
    run_small(tmp_path, [*alike, "run.name=plain", "train.epochs=2"])
    run_small(tmp_path, alike)
    assert not counters["stats"]["calls_captured"]
    run_small(tmp_path, [*alike, "train.epochs=2", "train.compile=default"])
    assert counters["stats"]["calls_captured"] > 0
    plain, compiled = (lines(tmp_path / name) for name in ("plain", "small"))
    for one, other in zip(plain, compiled, strict=True):
        for key in {"loss", "logloss"} & one.keys():
            assert other[key] == pytest.approx(one[key], rel=1e-4)


@pytest.mark.parametrize("override", ["run.device=cpu", "optim.embedding.optimizer=helen"])
def test_impossible_cuda_graphs_are_refused_before_data_are_read(tmp_path, override):
    with pytest.raises(SettingsError, match=r"train.compile: found 'cuda_graphs', which works"):
        small_config(tmp_path, "train.compile=cuda_graphs", override)


def test_without_a_compiler_it_says_what_to_write(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    with torch._inductor.config.patch({"cpp.cxx": ("/nonexistent",), "fx_graph_cache": False}):
        assert exit_status(lambda: run_small(tmp_path, ["train.compile=default"])) == 1
    said = capsys.readouterr().err
    assert "error: torch.compile failed (" in said
    assert "write train.compile=none" in said


def test_cuda_graphs_are_for_gpus():
    asked = {}

    class Network(torch.nn.Module):
        def compile(self, **options):
            asked.update(options)

    compile_network(Network(), "cuda_graphs", torch.device("cuda"))
    assert asked == {"dynamic": False, "mode": "reduce-overhead"}
    with pytest.raises(SettingsError, match=r"train.compile: found 'cuda_graphs'.* write "):
        compile_network(Network(), "cuda_graphs", torch.device("cpu"))
