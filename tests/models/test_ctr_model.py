"""The model front and DeepFM against brute force."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from stampede.models import CTRModel, StoredColumns
from stampede.models.deepfm import DeepFM
from stampede.models.fm_terms import second_order
from stampede.native_library import switched_off


@given(shape=st.tuples(st.integers(0, 4), st.integers(1, 5), st.integers(1, 4)))
def test_gradient_of_the_second_order_term(shape):
    """Of a slice of stored rows, as autograd finds it."""
    stored = torch.randn(*shape[:2], shape[2] + 2, dtype=torch.float64, requires_grad=True)
    embeddings, weights = stored[..., : shape[2]], torch.randn(shape[0], dtype=torch.float64)
    by_pairs = 0.5 * (embeddings.sum(1).square() - embeddings.square().sum(1)).sum(1)
    (expected,) = torch.autograd.grad(by_pairs @ weights, stored)
    (found,) = torch.autograd.grad(second_order(embeddings) @ weights, stored)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dim, stored", [(10, 12), (3, 4), (4, 8), (1, 4), (11, 12), (12, 16)])
def test_stored_width_is_a_multiple_of_4_with_room_for_the_first_order_weight(dim, stored):
    columns = StoredColumns(dim)
    assert columns.stored == stored
    assert columns.names["padding"] == (dim + 1, stored)
    embedding, first_order = columns.split(torch.arange(stored).repeat(2, 1))
    assert embedding.tolist() == [list(range(dim))] * 2
    assert first_order.tolist() == [[dim]] * 2


KERNEL = "_JoinedWithOrders"


def deepfm(numbers=2, scale=1.0):
    sizes = {"a": 5, "b": 7}
    model = CTRModel("deepfm", sizes, numbers, 3, [8, 8], seed=0, first_order_scale=scale)
    nn.init.constant_(model.bias, 0.5)
    return model


def steps_of(node):
    """Names of the functions that a gradient passes through."""
    names, waiting = set(), [node]
    while waiting:
        node = waiting.pop()
        if node is not None:
            names.add(node.name())
            waiting += [following for following, _ in node.next_functions]
    return names


def outcome(model, rows, numbers, *, in_one_pass=True):
    """Logits, and gradients of rows and parameters."""
    model.zero_grad()
    rows = rows.clone().requires_grad_()
    logits = model.logits(rows, numbers)
    assert any(KERNEL in name for name in steps_of(logits.grad_fn)) == in_one_pass
    logits.square().sum().backward()
    dense = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [logits.detach(), rows.grad, *dense]


class Sum(nn.Module):
    def forward(self, embeddings, dense):
        return embeddings.sum((1, 2))


def change(model, how):
    if how == "an equal subclass":
        model.network.__class__ = type("Same", (DeepFM,), {})
    elif how == "a subclass":
        model.network.__class__ = type("Summing", (DeepFM,), {"forward": Sum.forward})
    elif how == "another network":
        model.network = Sum()
    elif how.startswith("hook of "):
        module = getattr(model, how.removeprefix("hook of "))
        module.register_forward_hook(lambda _module, _inputs, output: 2 * output)


@pytest.mark.parametrize(
    "how, in_one_pass",
    [
        ("nothing", True),
        ("an equal subclass", True),
        ("a subclass", False),
        ("another network", False),
        ("hook of network", False),
        ("hook of number_weights", False),
    ],
)
@pytest.mark.parametrize("numbers, scale", [(2, 1.0), (2, 3.0), (0, 1.0)])
def test_a_model_gives_what_its_parts_do(how, in_one_pass, numbers, scale):
    """Also where parts of it were hooked or replaced, which are called then."""
    if how == "hook of number_weights" and not numbers:
        return
    torch.manual_seed(0)
    model, rows, given = deepfm(numbers, scale), torch.randn(70, 8), torch.randn(70, numbers)
    change(model, how)
    found = outcome(model, rows, given, in_one_pass=in_one_pass)
    embeddings, first_order = model.front.split(rows)
    expected = model.network(embeddings, given) + scale * first_order.sum(1) + 0.5
    if numbers:
        expected = expected + scale * model.number_weights(given).squeeze(1)
    torch.testing.assert_close(found[0], expected.detach())
    with switched_off():
        plain = outcome(model, rows, given, in_one_pass=False)
    # Sums over 70 samples, added in another order.
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["deepfm", "dlrm", "lr"])
def test_tables_of_other_widths_are_mapped_to_the_models(name):
    """As a model of one width, given the embeddings that a matrix product makes of theirs."""
    widths, stored, dim = {"a": 4, "b": 2, "c": 9}, {"a": 8, "b": 4, "c": 12}, 4
    sizes = dict.fromkeys(widths, 5)
    torch.manual_seed(7)
    model = CTRModel(name, sizes, 2, dim, [6], 0, dims=widths).double()
    other = CTRModel(name, sizes, 2, dim, [6], 0).double()
    # All layers but the mappings begin with the same weights.
    assert set(model.projections) == {"of_b", "of_c"} and not len(other.projections)
    rows = torch.randn(3, sum(stored.values()), dtype=torch.float64, requires_grad=True)
    numbers, same = torch.randn(3, 2, dtype=torch.float64), []
    for field, part in zip(widths, rows.split(list(stored.values()), 1), strict=True):
        embedding, first_order = part[:, : widths[field]], part[:, widths[field]]
        if field != "a":
            embedding = embedding @ model.projections[f"of_{field}"].T
        padding = torch.zeros(3, 3, dtype=torch.float64)
        same.append(torch.cat([embedding, first_order[:, None], padding], 1))
    found, expected = model.logits(rows, numbers), other.logits(torch.cat(same, 1), numbers)
    torch.testing.assert_close(found, expected)
    weights = [rows, *model.projections.values()]
    grads = [
        torch.autograd.grad(one.sum(), weights, allow_unused=True) for one in (found, expected)
    ]
    assert (grads[0][0] != 0).any()
    torch.testing.assert_close(*grads)
