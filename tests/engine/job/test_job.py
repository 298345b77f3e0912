"""How the dense layers compute: their precision, and torch.compile."""

import pytest
import torch
import torch._inductor.config
from torch._dynamo.utils import counters

from stampede.engine.exit_status import exit_status
from stampede.engine.job.compile import compile_network
from stampede.engine.job.precision import _speed_of_bf16, choose_precision
from stampede.settings import SettingsError
from support.jobs import lines, run_small

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def afresh():
    """torch.compile remembers nothing of other tests."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.wide
@pytest.mark.usefixtures("afresh")
def test_a_continued_run_may_be_compiled(tmp_path):
    # All batches of a part are of one size: each size is compiled anew, as is each layer.
    alike = ["model.hidden=[16]", "data.rows=512", "data.test_rows=256",
             "data.validation_fraction=0", "evaluate.select_on=test", "train.log_every=1",
             "checkpoint.resume=auto"]  # fmt: skip
    run_small(tmp_path, [*alike, "run.name=plain", "train.epochs=2"])
    run_small(tmp_path, alike)
    assert not counters["stats"]["calls_captured"]
    run_small(tmp_path, [*alike, "train.epochs=2", "train.compile=default"])
    assert counters["stats"]["calls_captured"] > 0
    plain, compiled = (lines(tmp_path / name) for name in ("plain", "small"))
    for one, other in zip(plain, compiled, strict=True):
        for key in {"loss", "logloss"} & one.keys():
            assert other[key] == pytest.approx(one[key], rel=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("afresh")
def test_without_a_compiler_the_error_says_what_to_write(tmp_path, monkeypatch, capsys):
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

    compile_network(Network(), "cuda_graphs", GPU)
    assert asked == {"dynamic": False, "mode": "reduce-overhead"}
    with pytest.raises(SettingsError, match=r"train.compile: found 'cuda_graphs'.* write "):
        compile_network(Network(), "cuda_graphs", CPU)


@pytest.mark.parametrize("asked", ["auto", "bf16"])
@pytest.mark.parametrize("speed, is_bf16", [(2.5, True), (0.4, False)])
def test_bf16_is_taken_where_it_is_faster(monkeypatch, asked, speed, is_bf16):
    monkeypatch.setattr("stampede.engine.job.precision._speed_of_bf16", lambda: speed)
    chosen = choose_precision(asked, CPU)
    assert chosen.is_bf16 == is_bf16
    assert "2.5 times" in chosen.reason
    with chosen.computing(CPU):
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    assert product.dtype == (torch.bfloat16 if is_bf16 else torch.float32)


def test_what_gpus_compute_in(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 0))
    for asked in ("tf32", "bf16"):
        chosen = choose_precision(asked, GPU)
        assert not (chosen.is_bf16 or chosen.is_tf32)
        assert chosen.reason == f"fp32 instead of {asked}: this GPU does not support {asked}"
    assert choose_precision("auto", GPU).reason == "fp32: this GPU does not support bf16"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert not choose_precision("tf32", CPU).is_tf32
    assert choose_precision("auto", GPU).is_bf16
    chosen = choose_precision("tf32", GPU)
    # It does not stay.
    before = torch.get_float32_matmul_precision()
    with chosen.computing(CPU):
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == before


def test_the_speed_of_bf16_is_measured():
    assert 0 < _speed_of_bf16(rows=64, width=32, repeats=1) < 1e3
