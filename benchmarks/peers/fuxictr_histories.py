"""Compares `din` and `bst` with FuxiCTR's on the same weights: logits and gradients in float64.

Run it in an environment with fuxictr and the requirements of stampede, and a checkout of FuxiCTR
for its BST, which its package lacks:

    PYTHONPATH=.:/tmp/FuxiCTR python benchmarks/peers/fuxictr_histories.py

FuxiCTR pads histories on the left, and its padding takes part in no sum that is compared, but in
Dice's statistics: there all histories are full. Networks of several goals are compared by
`tests/models/fixtures/record.py --gradients`.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import torch
from fuxictr.pytorch.layers import Dice, DIN_Attention, MLP_Block
from model_zoo.BST.src.BST import BST
from torch import Tensor, nn
from torch.nn import functional

from stampede.models import CTRModel, network
from stampede.models.histories import Jagged
from stampede.models.options import AttentionOptions

BATCH, ROWS, DIM, MOST, HIDDEN = 64, 30, 8, 6, [16, 8]
FIELDS = ["user", "item", "history"]


class DIN(nn.Module):
    """FuxiCTR's attention and MLP as its DIN joins them."""

    def __init__(self, softmax: bool, dice: bool) -> None:
        super().__init__()
        self.attention = DIN_Attention(
            DIM, [7, 5], "Dice" if dice else "PReLU", use_softmax=softmax
        )
        activations = [Dice(width) for width in HIDDEN] if dice else "PReLU"
        self.mlp = MLP_Block(3 * DIM, HIDDEN, activations, output_dim=1, batch_norm=dice)


def samples(full: bool = False) -> tuple[Tensor, Tensor]:
    """Ids of user and item `[batch, 2]`, and of histories `[batch, MOST]` with 0 for padding."""
    draw = torch.Generator().manual_seed(1)
    lengths = torch.randint(MOST if full else 0, MOST + 1, (BATCH,), generator=draw)
    history = torch.randint(1, ROWS, (BATCH, MOST), generator=draw)
    history[torch.arange(MOST) < MOST - lengths.unsqueeze(1)] = 0
    return torch.randint(1, ROWS, (BATCH, 2), generator=draw), history


def ours(
    name: str, how: str, options: dict[str, Any], unit: AttentionOptions, norm: str = "none"
) -> CTRModel:
    """A model of ours with random float64 weights."""
    sizes, queries = dict.fromkeys(FIELDS, ROWS), {how: {"history": "item"}}
    checked = network(name).options.model_validate(options)
    model = CTRModel(
        name, sizes, 0, DIM, HIDDEN, 0, checked, unit=unit, normalization=norm, **queries
    )
    torch.manual_seed(2)
    for key, parameter in model.named_parameters():
        if not key.startswith("front."):
            parameter.data = 0.4 * torch.randn(parameter.shape, dtype=torch.float64)
    for one in model.batch_norms:
        one.double()
    return model


def logits(model: CTRModel, tables: Tensor, ids: Tensor, history: Tensor) -> Tensor:
    """Ours, of tables `[users or items, ROWS, DIM]`; histories use the items' table."""
    front = model.front

    def stored(rows: Tensor) -> Tensor:
        return functional.pad(rows, [0, front.columns.stored - DIM])

    given = [stored(tables[0, ids[:, 0]]), stored(tables[1, ids[:, 1]])]
    if front.attention:
        given.append(torch.zeros_like(given[0]))
    kept = history > 0
    values = Jagged(stored(tables[1, history[kept]]), kept.sum(1))
    return model.logits(torch.cat(given, 1), torch.zeros(BATCH, 0), histories={"history": values})


def mlp_state(model: CTRModel) -> list[Tensor]:
    """Weights of our MLP in the order of FuxiCTR's."""
    found = []
    for layer in model.network.mlp.hidden._mlp:
        found += [layer._linear.weight, layer._linear.bias]
    return [*found, model.network.mlp.output.weight, model.bias]


def compare_din(softmax: bool, dice: bool = False) -> tuple[float, float]:
    """With Dice, batch norm comes before it in the MLP."""
    activation = "dice" if dice else "prelu"
    unit = AttentionOptions(hidden=[7, 5], softmax=softmax, activation=activation)
    norm = "batch" if dice else "none"
    model = ours("din", "attention", {"activation": activation}, unit, norm)
    theirs = DIN(softmax, dice).double()
    layers = [*model.attention["of_history"].hidden._mlp, *model.network.mlp.hidden._mlp]
    # Their PReLU has one slope for a layer.
    for layer in () if dice else layers:
        layer._activation_fn.activation.weight.data[:] = 0.3
    for one in theirs.modules():
        if isinstance(one, nn.PReLU):
            one.weight.data[:] = 0.3
        if isinstance(one, Dice):
            one.bn.eps = 1e-8  # The paper's.
    unit_of = model.attention["of_history"]
    weights = [w for one in unit_of.hidden._mlp for w in (one._linear.weight, one._linear.bias)]
    pairs = linear_pairs(theirs.attention, [*weights, unit_of.output.weight, unit_of.output.bias])
    pairs += linear_pairs(theirs.mlp, mlp_state(model))
    slopes = [one.alpha for one in theirs.modules() if isinstance(one, Dice)]
    of_layers = [layer._activation_fn.activation for layer in layers] if dice else []
    pairs += [(one.alpha, slope) for one, slope in zip(of_layers, slopes, strict=True)]
    norms = [one for one in theirs.mlp.modules() if isinstance(one, nn.BatchNorm1d) and one.affine]
    for one, other in zip([one for one in model.batch_norms if one.affine], norms, strict=True):
        pairs += [(one.weight, other.weight), (one.bias, other.bias)]

    def their_logits(tables: Tensor, ids: Tensor, history: Tensor) -> Tensor:
        user, item = tables[0, ids[:, 0]], tables[1, ids[:, 1]]
        pooled = theirs.attention(item, tables[1, history], (history > 0).double())
        # Their softmax of a history without ids is even, over the padding; ours is zeros.
        pooled = pooled * (history > 0).any(1, keepdim=True)
        return theirs.mlp(torch.cat([user, item, pooled], 1)).squeeze(1)

    return differences(model, their_logits, pairs, full=dice)


def compare_bst(pooling: str) -> tuple[float, float]:
    options = {"layers": 2, "heads": 2, "positions": MOST + 1, "pooling": pooling}
    model = ours("bst", "sequences", options, AttentionOptions())
    features = OrderedDict(
        (name, {"type": "categorical", "source": "", "vocab_size": ROWS}) for name in FIELDS[:2]
    )
    features["history"] = {
        "type": "sequence", "source": "", "vocab_size": ROWS, "max_len": MOST, "padding_idx": 0,
        "feature_encoder": None, "share_embedding": "item",
    }  # fmt: skip
    shape = SimpleNamespace(
        features=features, labels=[], num_fields=3, dataset_id="", data_dir="",
        sum_emb_out_dim=lambda: 2 * DIM,
    )  # fmt: skip
    theirs = BST(
        shape, embedding_dim=DIM, dnn_hidden_units=HIDDEN, num_heads=2,
        stacked_transformer_layers=2, bst_target_field=["item"], bst_sequence_field=["history"],
        seq_pooling_type=pooling, task="regression", loss="binary_crossentropy", optimizer="adam",
        learning_rate=1e-3, verbose=0, model_root="", metrics=[],
    ).double()  # fmt: skip
    (transformer,) = model.network.transformers
    encoder = theirs.transformer_encoders[0]
    pairs = linear_pairs(theirs.dnn, mlp_state(model))
    # Theirs count from the oldest place of the padded history.
    encoder.position_emb.data = transformer.positions.detach().flip(0)
    for block, their_block in zip(transformer.blocks, encoder.transformer_blocks, strict=True):
        of = their_block.attention
        pairs += [(block.inputs.weight, of.in_proj_weight), (block.inputs.bias, of.in_proj_bias)]
        others = [
            (block.outputs, of.out_proj), (block.first, their_block.ffn[0]),
            (block.second, their_block.ffn[2]), (block.norms[0], their_block.layer_norm1),
            (block.norms[1], their_block.layer_norm2),
        ]  # fmt: skip
        pairs += [(a.weight, b.weight) for a, b in others] + [(a.bias, b.bias) for a, b in others]

    def their_logits(tables: Tensor, ids: Tensor, history: Tensor) -> Tensor:
        looked_up = {
            "user": tables[0, ids[:, 0]], "item": tables[1, ids[:, 1]],
            "history": tables[1, history],
        }  # fmt: skip
        theirs.embedding_layer.forward = lambda _: dict(looked_up)
        theirs.get_inputs = lambda _: {"history": history}
        return theirs({})["y_pred"].squeeze(1)

    return differences(model, their_logits, pairs)


def linear_pairs(theirs: nn.Module, weights: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Our weights beside those of their linear layers, in order."""
    layers = [one for one in theirs.modules() if isinstance(one, nn.Linear)]
    return list(zip(weights, [w for one in layers for w in (one.weight, one.bias)], strict=True))


def differences(
    model: CTRModel, their_logits: Any, pairs: list[tuple[Tensor, Tensor]], full: bool = False
) -> tuple[float, float]:
    """Largest differences of logits, and of gradients of tables and layers, relative to largest."""
    for mine, other in pairs:
        other.data = mine.detach().clone()
    draw = torch.Generator().manual_seed(3)
    tables = torch.randn(2, ROWS, DIM, dtype=torch.float64, generator=draw).requires_grad_()
    found = []
    for one, side in ((lambda *given: logits(model, *given), 0), (their_logits, 1)):
        values = one(tables, *samples(full))
        leaves = [tables, *(pair[side] for pair in pairs)]
        weights = torch.randn(BATCH, dtype=torch.float64, generator=draw.manual_seed(4))
        found.append((values, torch.autograd.grad(values @ weights, leaves)))
    (a, grads), (b, others) = found
    assert a.std() > 0.1
    apart = max(float((x - y).abs().max()) for x, y in zip(grads, others, strict=True))
    largest = max(float(one.abs().max()) for one in others)
    return float((a - b).detach().abs().max() / b.detach().abs().max()), apart / largest


def main() -> int:
    """Print the differences; 1 if any is not one of rounding."""
    found = {f"din, softmax: {softmax}": compare_din(softmax) for softmax in (False, True)}
    found["din, dice"] = compare_din(False, dice=True)
    found |= {f"bst, {pooling}": compare_bst(pooling) for pooling in ("mean", "sum", "target")}
    for name, (of_logits, of_gradients) in found.items():
        print(f"{name:20} logits differ by {of_logits:.1e}, gradients by {of_gradients:.1e}")
    return int(max(max(pair) for pair in found.values()) > 1e-10)


if __name__ == "__main__":
    sys.exit(main())
