"""Networks that read histories, against plain float64 PyTorch written sample by sample."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from stampede.models import CTRModel, network
from stampede.models.histories import Jagged, Padded, tile
from stampede.models.options import AttentionOptions
from stampede.models.target_attention import TargetAttention
from stampede.settings import SettingsError
from support.memory import peak_memory

SIZES = {"user": 5, "items": 7, "item": 7, "history": 7, "seen": 7}
DIM, BATCH = 4, 9
LENGTHS = {"history": [2, 0, 1, 5, 3, 0, 4, 1, 2], "seen": [0, 1, 3, 2, 0, 6, 1, 1, 1]}


def double_model(name, options=None, hidden=(8, 6), **more):
    checked = network(name).options.model_validate(options or {})
    model = CTRModel(name, SIZES, 2, DIM, hidden, 0, checked, **more)
    torch.manual_seed(5)
    for name, parameter in model.named_parameters():
        if not name.startswith("front."):
            parameter.data = torch.randn(parameter.shape, dtype=torch.float64) * 0.5
    for norm in model.batch_norms:
        norm.running_mean = torch.randn(norm.num_features, dtype=torch.float64)
        norm.running_var = torch.rand(norm.num_features, dtype=torch.float64) + 0.1
    return model


def inputs_of(model, lengths=LENGTHS):
    torch.manual_seed(6)
    front = model.front
    rows = torch.randn(BATCH, len(front.pooled), front.columns.stored, dtype=torch.float64)
    for field in front.attention:
        rows[:, front.place(field)] = 0
    histories = {
        name: Jagged(
            torch.randn(sum(of), front.columns.stored, dtype=torch.float64).requires_grad_(),
            torch.tensor(of),
        )
        for name, of in lengths.items()
    }
    return rows.requires_grad_(), torch.randn(BATCH, 2, dtype=torch.float64), histories


def compare(model, expected, rows, numbers, histories):
    """Logits, and gradients of rows, histories and layers."""
    found = model.logits(rows.flatten(1), numbers, histories=histories)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert found.std() > 0.1
    weights = torch.randn(BATCH, dtype=torch.float64)
    layers = [p for n, p in model.named_parameters() if not n.startswith("front.")]
    leaves = [rows, *(one.values for one in histories.values()), *layers]
    grads = [torch.autograd.grad(one @ weights, leaves) for one in (found, expected)]
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


def mlp_by_hand(mlp, x, activation):
    for layer in mlp.hidden._mlp:
        x = activation(layer._linear(x), layer)
    return mlp.output(x).squeeze(1)


def prelu(x, layer):
    return torch.where(x > 0, x, x * layer._activation_fn.activation.weight)


def relu(x, layer):
    return x.clamp(min=0)


def dice_of(x, mean, variance, layer):
    share = 1 / (1 + (-(x - mean) / (variance + 1e-8).sqrt()).exp())
    return share * x + (1 - share) * layer._activation_fn.activation.alpha * x


def dice(x, layer):
    norm = layer._activation_fn.activation.norm
    return dice_of(x, norm.running_mean, norm.running_var, layer)


ACTIVATIONS = {"prelu": prelu, "relu": relu, "dice": dice}


def attended_by_hand(unit, activation, softmax, query, rows):
    if not len(rows):
        return rows.new_zeros(rows.shape[1])
    weights = []
    for row in rows:
        key = row[:DIM]
        x = torch.cat([query, key, query - key, query * key])
        for layer in unit.hidden._mlp:
            x = activation(layer._linear(x), layer)
        weights.append(unit.output(x))
    weights = torch.cat(weights)
    if softmax:
        weights = weights.exp() / weights.exp().sum()
    return sum(weight * row for weight, row in zip(weights, rows, strict=True))


@pytest.mark.parametrize("name", ["din", "deepfm"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("softmax", [False, True])
def test_attention(name, activation, softmax):
    options = {"activation": activation} if name == "din" else {}
    unit = AttentionOptions(hidden=[5, 3], activation=activation, softmax=softmax)
    queries = {"history": "item", "seen": "user"}
    # Dice then has running statistics.
    model = double_model(name, options, attention=queries, unit=unit).eval()
    rows, numbers, histories = inputs_of(model)
    fields = list(rows.unbind(1))
    for field, query in queries.items():
        of_sample = histories[field].values.split(LENGTHS[field])
        fields[model.front.place(field)] = torch.stack([
            attended_by_hand(
                model.attention[f"of_{field}"], ACTIVATIONS[activation], softmax,
                rows[i, model.front.place(query), :DIM], of_sample[i],
            )
            for i in range(BATCH)
        ])  # fmt: skip
    stored = torch.stack(fields, 1)
    embeddings = stored[..., :DIM]
    x = torch.cat([embeddings.flatten(1), numbers], 1)
    if name == "din":
        expected = mlp_by_hand(model.network.mlp, x, ACTIVATIONS[activation]) + model.bias
    else:
        pairs = sum(
            (embeddings[:, i] * embeddings[:, j]).sum(1) for i in range(5) for j in range(i)
        )
        first_order = stored[..., DIM].sum(1) + model.number_weights(numbers).squeeze(1)
        expected = mlp_by_hand(model.network.mlp, x, relu) + model.bias + pairs + first_order
    compare(model, expected, rows, numbers, histories)


def test_in_training_dice_has_statistics_of_all_ids_and_samples():
    options, unit = {"activation": "dice"}, AttentionOptions(hidden=[5, 3], activation="dice")
    model = double_model("din", options, attention={"history": "item"}, unit=unit)
    rows, numbers, histories = inputs_of(model, {"history": LENGTHS["history"]})

    def in_training(x, layer):
        mean = x.mean(0)
        return dice_of(x, mean, (x - mean).square().mean(0), layer)

    ids, place = histories["history"].values, model.front.place("history")
    of_ids = [i for i, length in enumerate(LENGTHS["history"]) for _ in range(length)]
    query, key = rows[of_ids, model.front.place("item"), :DIM], ids[:, :DIM]
    x = torch.cat([query, key, query - key, query * key], 1)
    unit = model.attention["of_history"]
    for layer in unit.hidden._mlp:
        x = in_training(layer._linear(x), layer)
    weighted = unit.output(x) * ids
    attended = (
        torch.zeros(BATCH, ids.shape[1]).double().index_add(0, torch.tensor(of_ids), weighted)
    )
    stored = torch.cat([rows[:, :place], attended[:, None], rows[:, place + 1 :]], 1)
    x = torch.cat([stored[..., :DIM].flatten(1), numbers], 1)
    expected = mlp_by_hand(model.network.mlp, x, in_training) + model.bias
    compare(model, expected, rows, numbers, histories)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_in_bf16_only_products_are_rounded(activation):
    """The kernels of the unit, which are float32, take part as without autocast."""
    unit = AttentionOptions(hidden=[32, 16], activation=activation)
    attention = TargetAttention(8, unit, torch.Generator().manual_seed(1))
    lengths = torch.tensor([3, 0, 40, 1, 17] * 20)
    draw = torch.Generator().manual_seed(2)
    query, rows = (torch.randn(n, 8, generator=draw) for n in (len(lengths), int(lengths.sum())))
    found = {}
    for is_bf16 in (False, True):
        given = query.clone().requires_grad_(), rows.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=is_bf16):
            attended = attention(given[0], Jagged(given[1], lengths))
        assert attended.dtype == torch.float32
        assert "_WeightedSums" in attended.grad_fn.name()
        attended.square().sum().backward()
        found[is_bf16] = [attended.detach(), *(tensor.grad for tensor in given)]
    for rounded, exact in zip(found[True], found[False], strict=True):
        error = (rounded - exact).norm() / exact.norm()
        assert 0 < error < 0.04


def block_by_hand(block, x):
    """With torch's own attention, for one sample `[n, width]`."""
    width = x.shape[1]
    attention = nn.MultiheadAttention(width, block.heads, batch_first=True, dtype=torch.float64)
    given = {
        "in_proj_weight": block.inputs.weight, "in_proj_bias": block.inputs.bias,
        "out_proj.weight": block.outputs.weight, "out_proj.bias": block.outputs.bias,
    }  # fmt: skip
    attended = torch.func.functional_call(attention, given, (x[None], x[None], x[None]))[0][0]

    def normed(norm, y):
        deviation = (y - y.mean(1, keepdim=True)).square().mean(1, keepdim=True)
        return (y - y.mean(1, keepdim=True)) / (deviation + 1e-5).sqrt() * norm.weight + norm.bias

    x = normed(block.norms[0], x + attended)
    hidden = functional.leaky_relu(block.first(x))
    return normed(block.norms[1], x + block.second(hidden))


@pytest.mark.parametrize("pooling", ["mean", "sum", "target"])
def test_bst(pooling):
    options = {"layers": 2, "heads": 4, "positions": 4, "pooling": pooling}
    queries = {"history": "item", "seen": "user"}
    model = double_model("bst", options, sequences=queries)
    rows, numbers, histories = inputs_of(model)
    read = []
    for (field, query), transformer in zip(
        queries.items(), model.network.transformers, strict=True
    ):
        outputs = []
        for i, ids in enumerate(histories[field].values.split(LENGTHS[field])):
            target = rows[i, model.front.place(query), :DIM]
            x = torch.cat([ids[:, :DIM], target[None]])
            backwards = torch.arange(len(x) - 1, -1, -1).clamp(max=3)
            x = torch.cat([x, transformer.positions[backwards]], 1)
            for block in transformer.blocks:
                x = block_by_hand(block, x)
            outputs.append({"mean": x.mean(0), "sum": x.sum(0), "target": x[-1]}[pooling])
        read.append(torch.stack(outputs))
    x = torch.cat([rows[..., :DIM].flatten(1), numbers, *read], 1)
    compare(model, mlp_by_hand(model.network.mlp, x, relu) + model.bias, rows, numbers, histories)


@pytest.mark.parametrize(
    "name, how, softmax",
    [("din", "attention", False), ("din", "attention", True), ("bst", "sequences", False)],
)
def test_places_of_padding_do_not_matter(name, how, softmax):
    """Also of samples without ids, whose softmax is not defined."""
    unit = AttentionOptions(hidden=[5, 3], softmax=softmax)
    model = double_model(name, **{how: {"history": "item"}}, unit=unit)
    rows, numbers, histories = inputs_of(model, {"history": LENGTHS["history"]})
    expected = model.logits(rows.flatten(1), numbers, histories=histories)
    values, is_id = torch.full((BATCH, 11, 8), 9.0).double(), torch.zeros(BATCH, 11).bool()
    for i, ids in enumerate(histories["history"].values.split(LENGTHS["history"])):
        places = torch.randperm(11)[: len(ids)].sort().values
        values[i, places], is_id[i, places] = ids, True
    padded = {"history": Padded(values, is_id)}
    found = model.logits(rows.flatten(1), numbers, histories=padded)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_tiles_have_the_ids_of_their_samples():
    lengths, values = torch.tensor(LENGTHS["history"]), torch.randn(18, 3)
    whole = {"history": Jagged(values, lengths)}
    grads = {"history": torch.zeros(18, 3)}
    cells = values.split(LENGTHS["history"])
    for first in range(0, BATCH, 4):
        part = tile(whole, first, first + 4, grads)["history"]
        assert torch.equal(part.values, torch.cat(cells[first : first + 4]))
        assert part.lengths.tolist() == LENGTHS["history"][first : first + 4]
        (part.values**2).sum().backward()
    torch.testing.assert_close(grads["history"], 2 * values)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_memory_does_not_grow_with_the_longest_history(activation):
    """Padded, the 500 histories of the second log would have 2.5 million places for 10,000 ids."""
    unit = AttentionOptions(hidden=[64], activation=activation)
    options = {"activation": activation}
    checked = network("din").options.model_validate(options)
    queries = {"history": "item"}
    model = CTRModel("din", SIZES, 0, DIM, (8,), 0, checked, attention=queries, unit=unit)
    lengths = [20] * 500, [5000, *[10] * 498, 20]
    peaks = []
    for of in lengths:
        assert sum(of) == 10_000
        rows = torch.randn(500, len(model.front.pooled) * 8, requires_grad=True)
        values = torch.randn(10_000, 8, requires_grad=True)
        read = {"history": Jagged(values, torch.tensor(of))}
        peaks.append(peak_memory(
            lambda rows=rows, read=read: model.logits(rows, torch.zeros(500, 0), histories=read)
            .sum().backward()
        ))  # fmt: skip
    # An id has some vectors as wide as its hidden layer.
    assert peaks[1] <= 1.02 * peaks[0] and peaks[0] < 10_000 * 8 * 64 * 4


def test_no_id_at_all():
    for name, how in (("din", "attention"), ("bst", "sequences")):
        model = double_model(name, **{how: {"history": "item"}})
        rows, numbers, histories = inputs_of(model, {"history": [0] * BATCH})
        logits = model.logits(rows.flatten(1), numbers, histories=histories)
        logits.sum().backward()
        assert logits.isfinite().all() and histories["history"].values.grad.shape == (0, 8)


def test_networks_refuse_what_they_cannot_read():
    with pytest.raises(SettingsError, match=r"'deepfm' cannot read the ids of history one by one"):
        double_model("deepfm", sequences={"history": "item"})
    with pytest.raises(SettingsError, match=r"'bst' needs a history; write pooling: none"):
        double_model("bst")
    with pytest.raises(SettingsError, match=r"found 3, which does not divide 2 \* model.dim = 8"):
        double_model("bst", {"heads": 3}, sequences={"history": "item"})
