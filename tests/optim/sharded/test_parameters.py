"""Tables as parameters: rows that wait for their steps are up to date for whoever uses them."""

import copy
import io

import pytest
import torch
import torch.distributed as dist

from stampede.optim import local_cowclip_tables
from support.bags import PLANS, Bags, shard, step, with_cowclip
from support.updated_tables import computed

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
        arrays = [array for tables in local_cowclip_tables(model) for array in tables.backends]
        assert all(array.waiting.behind for array in arrays)
        with torch.no_grad():
            yield parameter, arrays


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_who_uses_a_table_finds_its_rows_up_to_date(waiting, use):
    parameter, arrays = waiting
    use(parameter)
    assert not any(array.waiting.behind for array in arrays)


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
def test_who_looks_at_its_shape_does_not_make_rows_step(waiting, look):
    parameter, arrays = waiting
    assert type(look(parameter)) is type(look(torch.nn.Parameter(torch.zeros(20, 8))))
    assert all(array.waiting.behind for array in arrays)


def test_a_saved_or_copied_one_is_an_ordinary_tensor(waiting):
    parameter, _ = waiting
    for one in (parameter, parameter.data):
        file = io.BytesIO()
        torch.save(one, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        assert type(loaded) is torch.Tensor
        copied = copy.deepcopy(one)
        assert torch.equal(loaded, one)
        assert torch.equal(copied, one)
        copied.zero_()
        assert one.any()
