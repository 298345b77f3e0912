"""The model front and DeepFM against brute force."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from stampede.models import NetworkShape, StoredColumns, network_names
from stampede.models.deepfm import DeepFM
from stampede.models.fm_terms import second_order
from stampede.models.mlp import MLP, glorot_normal_
from stampede.models.registry import network

SHAPE = NetworkShape(fields=5, dim=3, numbers=2, hidden=(8, 8))


def test_second_order_term_is_the_sum_over_pairs():
    module = DeepFM(SHAPE, torch.Generator().manual_seed(0))
    embeddings, dense = torch.randn(4, 5, 3), torch.randn(4, 2)
    pairs = sum(
        (embeddings[:, i] * embeddings[:, j]).sum(1) for i, j in itertools.combinations(range(5), 2)
    )
    mlp = module.mlp(torch.cat([embeddings.reshape(4, 15), dense], 1))
    torch.testing.assert_close(module(embeddings, dense), pairs + mlp)


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


def test_layers_start_as_keras_glorot_normal():
    generator = torch.Generator().manual_seed(0)
    weight = glorot_normal_(torch.empty(400, 273), generator)
    assert weight.std().item() == pytest.approx((2 / 673) ** 0.5, rel=0.01)
    assert weight.abs().max() <= 2 * (2 / 673) ** 0.5 / 0.8796
    mlp = MLP(5, [4, 3], generator)
    layers = [module for module in mlp.modules() if isinstance(module, nn.Linear)]
    assert [tuple(layer.weight.shape) for layer in layers] == [(4, 5), (3, 4), (1, 3)]
    assert layers[0].bias.abs().max() == 0 and layers[-1].bias is None


def test_networks_are_found_by_name():
    assert "deepfm" in network_names()
    with pytest.raises(KeyError, match="deepfm"):
        network("nothing")
