"""State that is saved, loaded, copied or of another precision."""

import copy
import pickle

import pytest
import torch

from stampede.optim import (
    CowClip,
    CowClipAdam,
    CowClipRowWiseAdam,
    CowClipSGD,
)
from support.one_table import EVERY_CLASS, saved_and_loaded, table, train


@EVERY_CLASS
def test_state_dict_continues_exactly(optimizer_class):
    whole, first = table(), table()
    settings = {"lr": 1e-2, "l2": 1e-3, "clip": CowClip(ratio=0.1)}
    optimizer = optimizer_class(whole.parameters(), **settings)
    train(whole, optimizer, 6)
    half = optimizer_class(first.parameters(), **settings)
    train(first, half, 3)
    second = table(seed=1)
    second.load_state_dict(first.state_dict())
    resumed = optimizer_class(second.parameters(), lr=0.5)
    resumed.load_state_dict(saved_and_loaded(half.state_dict()))
    train(second, resumed, 3, first=3)
    assert torch.equal(whole.weight, second.weight)


def test_state_dict_before_the_first_step():
    made = table()
    optimizer = CowClipAdam(made.parameters(), lr=0.3)
    state_dict = saved_and_loaded(optimizer.state_dict())
    assert state_dict["state"] == {}
    fresh = CowClipAdam(made.parameters())
    fresh.load_state_dict(state_dict)
    assert fresh.param_groups[0]["lr"] == 0.3
    train(made, fresh, 1)


def test_a_state_of_an_earlier_version_gets_the_new_settings():
    optimizer = CowClipAdam(table().parameters(), seed=3)
    state_dict = optimizer.state_dict()
    del state_dict["param_groups"][0]["seed"]
    optimizer.load_state_dict(state_dict)
    assert optimizer.param_groups[0]["seed"] == 3


def test_a_state_of_another_class_is_refused():
    made = table()
    other = CowClipRowWiseAdam(made.parameters())
    train(made, other, 1)
    optimizer = CowClipAdam(made.parameters())
    optimizer.load_state_dict(other.state_dict())
    with pytest.raises(ValueError, match="of the same class and model"):
        train(made, optimizer, 1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@EVERY_CLASS
def test_low_precision_tables_keep_float32_state(optimizer_class, dtype):
    made = table(dtype=dtype)
    arguments = {"momentum": 0.9} if optimizer_class is CowClipSGD else {}
    optimizer = optimizer_class(made.parameters(), lr=1e-2, **arguments)
    train(made, optimizer, 2)
    resumed = optimizer_class(made.parameters(), **arguments)
    resumed.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    for kept in (optimizer, resumed):
        states = [value for name, value in kept.state[made.weight].items() if name != "step"]
        assert states and all(state.dtype == torch.float32 for state in states)
    for name, state in resumed.state[made.weight].items():
        assert torch.equal(state, optimizer.state[made.weight][name])
    assert made.weight.dtype == dtype
    train(made, resumed, 1)


def test_sums_of_fp16_gradients_do_not_overflow():
    made = table(rows=2, dtype=torch.float16)
    optimizer = CowClipSGD(made.parameters(), lr=1e-6, clip=None)
    (made(torch.tensor([1, 1])) * 4e4).float().sum().backward()
    before = made.weight.detach().clone()
    optimizer.step()
    assert made.weight.isfinite().all() and not torch.equal(made.weight, before)


def test_float32_state_is_loaded_for_a_float64_table():
    made, exact = table(), table(dtype=torch.float64)
    optimizer = CowClipAdam(made.parameters())
    train(made, optimizer, 1)
    resumed = CowClipAdam(exact.parameters())
    resumed.load_state_dict(optimizer.state_dict())
    train(exact, resumed, 1)
    assert resumed.state[exact.weight]["exp_avg"].dtype == torch.float64


@EVERY_CLASS
def test_copies_and_pickles_go_on_as_the_original(optimizer_class):
    made = table()
    optimizer = optimizer_class(made.parameters(), lr=0.1)
    train(made, optimizer, 2)
    copies = [copy.deepcopy((made, optimizer)), pickle.loads(pickle.dumps((made, optimizer)))]
    train(made, optimizer, 2, first=2)
    for other, its_optimizer in copies:
        train(other, its_optimizer, 2, first=2)
        assert torch.equal(other.weight, made.weight)
