"""Behavior Sequence Transformer (arXiv 1905.06874)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from stampede.models.histories import History, Padded
from stampede.models.mlp import MLP, initialize_
from stampede.models.options import BSTOptions
from stampede.models.registry import NetworkShape
from stampede.settings import SettingsError


class Block(nn.Module):
    """`y = norm(x + attention(x))`, then `norm(y + W_2 leaky_relu(W_1 y))`: `[batch, n, width]`."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inputs, self.outputs = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x: Tensor, is_id: Tensor) -> Tensor:
        """The new vectors; `is_id` `[batch, n]` tells which ones are attended to."""
        query, key, value = (
            one.unflatten(2, (self.heads, -1)).transpose(1, 2) for one in self.inputs(x).chunk(3, 2)
        )
        mask = is_id[:, None, None, :]
        attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        x = self.norms[0](x + self.outputs(attended.transpose(1, 2).flatten(2)))
        return self.norms[1](x + self.second(functional.leaky_relu(self.first(x))))


class HistoryTransformer(nn.Module):
    """Transformer over a history and its target, each with the vector of its position beside it.

    A position counts from the target, 0, back to older ids, the most recent of which has 1.
    """

    def __init__(self, dim: int, options: BSTOptions) -> None:
        super().__init__()
        self.pooling = options.pooling
        self.positions = nn.Parameter(_sinusoids(options.positions, dim))
        blocks = (Block(2 * dim, options.heads) for _ in range(options.layers))
        self.blocks = nn.ModuleList(blocks)

    def forward(self, target: Tensor, history: Padded) -> Tensor:
        """`[batch, 2 * dim]` from the target `[batch, dim]` and the ids before it."""
        is_id = torch.cat([torch.ones_like(history.is_id[:, :1]), history.is_id], 1)
        x = torch.cat([target.unsqueeze(1), history.values], 1)
        # Ids from here to the end of the history.
        later = history.is_id.sum(1, keepdim=True) - history.is_id.cumsum(1) + 1
        later = torch.cat([torch.zeros_like(later[:, :1]), later], 1)
        positions = self.positions[later.clamp(max=len(self.positions) - 1)]
        x = torch.cat([x, positions], 2)
        for block in self.blocks:
            x = block(x, is_id)
        if self.pooling == "target":
            return x[:, 0]
        total = (x * is_id.unsqueeze(2)).sum(1)
        return total / is_id.sum(1, keepdim=True) if self.pooling == "mean" else total


class BST(nn.Module):
    """`MLP([e_1 .. e_F, x, transformer of each history])`.

    Histories are padded to the longest among the samples that are computed together.
    """

    def __init__(
        self, shape: NetworkShape, generator: torch.Generator, options: BSTOptions
    ) -> None:
        super().__init__()
        width = 2 * shape.dim
        if not shape.histories:
            raise SettingsError(
                "model.name: the network 'bst' needs a history; write pooling: none and query: "
                "FIELD at a field of several ids in the schema, or choose another network"
            )
        if width % options.heads:
            raise SettingsError(
                f"model.options.heads: found {options.heads}, which does not divide 2 * model.dim "
                f"= {width}; write a divisor"
            )
        self.queries = shape.histories
        self.mlp = MLP(shape.inputs + width * len(self.queries), shape, generator)
        self.transformers = nn.ModuleList(
            initialize_(HistoryTransformer(shape.dim, options), generator) for _ in self.queries
        )

    def forward(self, embeddings: Tensor, dense: Tensor, histories: Sequence[History]) -> Tensor:
        """Logits `[batch]` from embeddings `[batch, fields, dim]`, numbers `[batch, n]` and ids."""
        read = [
            transformer(embeddings[:, query], history.padded())
            for query, transformer, history in zip(
                self.queries, self.transformers, histories, strict=True
            )
        ]
        return self.mlp(torch.cat([embeddings.flatten(1), dense, *read], 1))


def _sinusoids(positions: int, dim: int) -> Tensor:
    """Sines and cosines of "Attention Is All You Need", `[positions, dim]`."""
    rates = torch.exp(torch.arange(0, dim, 2) * (-math.log(10000.0) / dim))
    angles = torch.arange(positions).unsqueeze(1) * rates
    return torch.stack([angles.sin(), angles.cos()], 2).flatten(1)[:, :dim].contiguous()
