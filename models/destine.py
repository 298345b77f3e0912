"""DESTINE (arXiv 2101.03654): self-attention whose pairwise and unary terms are learned apart."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stampede.models.autoint import FieldAttention
from stampede.models.mlp import linear
from stampede.models.options import DESTINEOptions
from stampede.models.registry import NetworkShape


class DisentangledAttention(nn.Module):
    """`sum_n (softmax(<q_m - mean q, k_n - mean k>) + softmax(u_n)) v_n` for each head (fig. 1).

    `q = Q e`, `k = K e`, `v = V e`; means and softmaxes are over the fields. The unary term
    `u_n = <Q' mean(e), k_n>` has its own projection; with `unary: field` it is `<w, e_n>`.
    Attention dropout takes single weights out of the sum of both softmaxes. No layer has a bias:
    biases of q and k would cancel in the pairwise term. Maps `[batch, fields, inputs]` to `[batch,
    fields, heads * width]`.
    """

    def __init__(self, inputs: int, options: DESTINEOptions, generator: torch.Generator) -> None:
        super().__init__()
        self.heads = options.heads
        self.scale = options.width**-0.5 if options.use_scale else 1.0
        outputs = options.heads * options.width
        self.query, self.key, self.value = (
            linear(inputs, outputs, generator, bias=False) for _ in range(3)
        )
        self.of_mean_query = options.unary == "mean_query"
        unary = outputs if self.of_mean_query else options.heads
        self.unary = linear(inputs, unary, generator, bias=False)
        self.dropout = nn.Dropout(options.att_dropout)
        self.residual: nn.Module | None = None
        if options.residual_mode == "each_layer":
            self.residual = linear(inputs, outputs, generator, bias=False)

    def forward(self, fields: Tensor) -> Tensor:
        """The fields' new vectors."""
        query, key, value = (
            self._by_head(layer(fields)) for layer in (self.query, self.key, self.value)
        )
        query, key = (one - one.mean(2, keepdim=True) for one in (query, key))
        if self.of_mean_query:
            # <u, k_n> and <u, k_n - mean k> differ by the same for all n.
            unary = self._by_head(self.unary(fields.mean(1, keepdim=True))) @ key.mT
        else:
            unary = self._by_head(self.unary(fields)).mT
        pairwise = self.scale * (query @ key.mT)
        weights = self.dropout(pairwise.softmax(3) + unary.softmax(3))
        attended = (weights @ value).transpose(1, 2).flatten(2)
        return attended if self.residual is None else attended + self.residual(fields)

    def _by_head(self, projected: Tensor) -> Tensor:
        """`[batch, heads, fields, width]` of `[batch, fields, heads * width]`."""
        return projected.unflatten(2, (self.heads, -1)).transpose(1, 2)


class DESTINE(FieldAttention):
    """`<w, relu(attention(e_1 .. e_F) + W_res e)>`, and an MLP of the embeddings with `deep`.

    The first-order term is the model's. Defaults are what the authors' scripts run
    (CRIPAC-DIG/DESTINE, `DSelfAttnWgt`). FuxiCTR has `unary: field`, `residual_mode: each_layer`,
    `relu: false`; its `attention_dim` is `heads * width`, and its first-order term is optional.
    With several heads FuxiCTR gives a head a mixture of fields and heads instead of its part of
    every field, because it reshapes without a transposition; here heads are heads.
    """

    def __init__(
        self, shape: NetworkShape, generator: torch.Generator, options: DESTINEOptions
    ) -> None:
        residual = options.residual_mode == "last_layer"
        super().__init__(
            shape, generator, options, DisentangledAttention, residual=residual, relu=options.relu
        )
