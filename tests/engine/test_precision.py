"""In which precision the dense layers compute, and who decides."""

import pytest
import torch

from stampede.engine.job import _speed_of_bf16, choose_precision

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("speed, is_bf16", [(2.5, True), (0.4, False)])
def test_bf16_is_taken_where_it_is_faster(monkeypatch, speed, is_bf16):
    monkeypatch.setattr("stampede.engine.job._speed_of_bf16", lambda: speed)
    chosen = choose_precision("bf16", CPU)
    assert chosen.is_bf16 == is_bf16
    assert "2.5 times" in chosen.reason
    with chosen.computing(CPU):
        product = torch.ones(2, 2) @ torch.ones(2, 2)
    assert product.dtype == (torch.bfloat16 if is_bf16 else torch.float32)


def test_an_old_gpu_computes_in_fp32(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 0))
    for asked in ("tf32", "bf16"):
        chosen = choose_precision(asked, GPU)
        assert not (chosen.is_bf16 or chosen.is_tf32)
        assert chosen.reason == f"fp32 instead of {asked}, which this GPU does not support"


def test_tf32_is_for_gpus_and_does_not_stay(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    assert not choose_precision("tf32", CPU).is_tf32
    chosen = choose_precision("tf32", GPU)
    before = torch.get_float32_matmul_precision()
    with chosen.computing(CPU):
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == before


def test_the_speed_of_bf16_is_measured():
    assert 0 < _speed_of_bf16(rows=64, width=32, repeats=1) < 1e3
