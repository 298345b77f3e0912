"""What TorchRec's programs read and write while rows wait for their steps."""

import copy
import io
from itertools import cycle

import pytest
import torch
import torch.distributed as dist

from stampede.optim import local_cowclip_tables
from support.bags import PLANS, Bags, shard, step, weights_of, with_cowclip
from support.updated_tables import computed


def arrays_of(model):
    return [array for tables in local_cowclip_tables(model) for array in tables.backends]


def trained(way, steps, plan, act=None):
    """A sharded model after some steps, in the middle of which something is done with it."""
    with computed(way, window=30):
        model = shard(with_cowclip(Bags(a=8), l2=1e-2), plan)
        for number in range(steps):
            if act is not None and number == steps // 2:
                assert all(a.waiting.behind == (way == "waiting") for a in arrays_of(model))
                act(model)
            step(model)
    return model


def parts_of(value):
    return [s.tensor for s in value.local_shards()] if hasattr(value, "local_shards") else [value]


def load_weights_of_ones(model):
    """The weights only; the state of the optimizer stays."""
    weights = copy.deepcopy(model.state_dict())
    for part in parts_of(weights["ebc.embedding_bags.a.weight"]):
        part.fill_(1.0)
    step(model)
    model.load_state_dict(weights)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("steps, act", [(1, None), (6, None), (8, load_weights_of_ones)])
def test_weights_have_all_steps_since_they_were_loaded(plan, steps, act):
    swept, waited = (trained(way, steps, plan, act) for way in ("kernels", "waiting"))
    assert torch.equal(weights_of(swept)["a"], weights_of(waited)["a"])


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_the_optimizers_state_has_all_steps(plan):
    found = []

    def read(model):
        states = model.fused_optimizer.state_dict()["state"].values()
        values = [value for of_table in states for value in of_table.values()]
        found.append([part.clone() for value in values for part in parts_of(value)])

    for way in ("kernels", "waiting"):
        trained(way, 8, plan, act=read)
    swept, waited = found
    assert len(swept) >= 3
    assert all(map(torch.equal, swept, waited))


USES = {
    "clone": torch.clone,
    "row": lambda p: p[3].clone(),
    "rows": list,
    "cat": lambda p: torch.cat([p, p]),
    "foreach": lambda p: torch._foreach_mul([p], 2.0),
    "numpy": lambda p: p.numpy().copy(),
    "view": lambda p: p.data,
    "copy": copy.deepcopy,
    "write": lambda p: p[:2].fill_(1.0),
    "init": torch.nn.init.ones_,
    "collective": lambda p: dist.broadcast(p, 0),
    "operator": lambda p: torch.ops.aten.mul(p, 2),
}
LOOKS = {
    "shape": lambda p: p.shape,
    "size": lambda p: p.size(0),
    "numel": lambda p: p.numel(),
    "grad": lambda p: p.grad,
    "device": lambda p: p.device,
    "dtype": lambda p: p.dtype,
}


@pytest.fixture(params=PLANS.values(), ids=PLANS)
def waiting(request):
    """A table's parameter, and its arrays, of which some rows are behind."""
    with computed("waiting", window=30):
        model = shard(with_cowclip(Bags(a=8), l2=1e-2), request.param)
        for _ in range(3):
            step(model)
        ((_, parameter),) = model.named_parameters()
        arrays = arrays_of(model)
        assert all(array.waiting.behind for array in arrays)
        with torch.no_grad():
            yield parameter, arrays


@pytest.mark.parametrize(
    "waiting, use",
    # Each on one of the plans, whose parameters are of one class.
    list(zip(cycle(PLANS.values()), [*USES, *LOOKS], strict=False)),
    indirect=["waiting"],
)
def test_using_a_table_brings_its_rows_up_to_date_and_a_look_at_its_shape_does_not(waiting, use):
    parameter, arrays = waiting
    result = {**USES, **LOOKS}[use](parameter)
    assert [array.waiting.behind for array in arrays] == [use in LOOKS] * len(arrays)
    if use in LOOKS:
        assert type(result) is type(LOOKS[use](torch.nn.Parameter(torch.zeros(20, 8))))


def test_a_saved_or_copied_table_is_an_ordinary_tensor(waiting):
    parameter, _ = waiting
    for one in (parameter, parameter.data):
        file = io.BytesIO()
        torch.save(one, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        assert type(loaded) is torch.Tensor
        copied = copy.deepcopy(one)
        assert torch.equal(loaded, one) and torch.equal(copied, one)
        copied.zero_()
        assert one.any()
