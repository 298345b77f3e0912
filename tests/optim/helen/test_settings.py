"""Settings and options that are refused."""

import dataclasses

import pytest
import torch
from torch import nn

from stampede.optim.helen import Helen, HelenSettings
from support.helen_model import Net


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}], ids=str)
@pytest.mark.parametrize("group_kind", ["embedding", "dense"])
def test_module_options_that_work_against_it_are_refused(option, group_kind):
    table = nn.Embedding(5, 3, **option)
    Helen([{"params": [table.weight], "kind": group_kind}])
    with pytest.raises(ValueError, match=next(iter(option))):
        table(torch.tensor([1]))


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"lr": -1}, "lr is -1"),
        ({"rho": float("nan")}, "rho is nan"),
        ({"rho": -0.1}, "rho is -0.1"),
        ({"bound": 1.5}, "bound is 1.5"),
        ({"bound": float("nan")}, "bound is nan"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"betas": (0.9,)}, "betas"),
        ({"eps": 0.0}, "eps is 0.0"),
        ({"weight_decay": -1.0}, "weight_decay is -1.0"),
        ({"l2": float("inf")}, "l2 is inf"),
        ({"rows": "some"}, "'all' or 'touched'"),
        ({"dense_norm": "total"}, "'all' or 'last_table'"),
        ({"net_pert": "yes"}, "False or True"),
    ],
)
def test_settings_out_of_range_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        Helen(Net().by_kind(), **arguments)
    with pytest.raises(ValueError, match=words):
        Helen([group | arguments for group in Net().by_kind()])


def test_a_group_of_another_kind_is_refused():
    with pytest.raises(ValueError, match="kind of a param group is 'wide'; write 'embedding'"):
        Helen(Net().parameters(), kind="wide")


def test_settings_are_hashable_and_those_of_the_repository():
    settings = HelenSettings()
    assert hash(settings) == hash(dataclasses.replace(settings))
    assert (settings.rho, settings.bound, settings.eps) == (0.05, 0.3, 1e-8)
