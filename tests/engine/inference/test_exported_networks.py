"""Networks are exported, those of users too."""

import json

import numpy as np
import pytest
import torch
from onnx.checker import check_model
from onnxruntime import InferenceSession
from torch import nn

from stampede.engine.errors import RunFolderError
from stampede.engine.inference.dense_part import DensePart, describe, export_dense_part
from stampede.engine.inference.export_command import main
from stampede.engine.inference.onnx_file import translated
from stampede.engine.inference.package.dense import Dense
from stampede.models import CTRModel, network
from support.jobs import run_small
from support.networks import goals_of
from support.own_networks import NUMBERS_ONLY, own_network
from support.packages import loaded, open_test_part
from support.predicting import run_command, scores

pytestmark = pytest.mark.usefixtures("one_registry")

# Those with layers of their own: `ple` has those of `mmoe` and `shared_bottom`, `deepfm` those of
# `wide_deep`, and of `din` without histories. Few layers take less long to export.
WITH_NUMBERS = {
    "autoint": {"layers": 1, "deep": True},
    "dcn": {"layers": 2},
    "dcnv2": {"layers": 2},
    "deepfm": {},
    "destine": {"layers": 1},
    "dlrm": {},
    "esmm": {},
    "finalmlp": {},
    "fm": {},
    "lr": {},
    "masknet": {"blocks": 2},
    "ple": {},
    "wukong": {"layers": 2},
    "xdeepfm": {"cin": [4]},
}
# Options with operations of their own, for logs without numbers.
WITHOUT_NUMBERS = {
    "deepfm": {},
    "dcnv2": {"cross": "full"},
    "destine": {"layers": 1, "unary": "field", "residual_mode": "each_layer", "use_scale": True},
    "dlrm": {"bottom": [4]},
    "finalmlp": {"second": [4], "heads": 2, "gates": None},
    "masknet": {"structure": "serial", "blocks": 2},
}


def from_json(program):
    """A program as a package has it."""
    graph, weights = describe(program)
    return Dense(json.loads(json.dumps(graph, allow_nan=False)), weights, torch.device("cpu"))


def dense_in_onnx(program):
    """The program in onnxruntime, as a function of rows of tables and numbers."""
    model = translated(program)
    check_model(model, full_check=True)
    session = InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    # A network may leave one of them out.
    taken = [one.name for one in session.get_inputs()]

    def computed(rows, numbers):
        given = {"inside/rows": rows.numpy(), "inside/numbers": numbers.numpy()}
        return torch.from_numpy(session.run(None, {name: given[name] for name in taken})[0])

    return computed


@pytest.mark.slow
@pytest.mark.cases(4)
@pytest.mark.parametrize(
    "name, numbers, options",
    [
        *((name, 2, options) for name, options in WITH_NUMBERS.items()),
        *((name, 0, options) for name, options in WITHOUT_NUMBERS.items()),
    ],
)
def test_networks_are_exported_for_any_number_of_samples(name, numbers, options):
    chosen = network(name).options.model_validate(options)
    sizes = {"a": 7, "b": 5, "c": 9}
    model = CTRModel(name, sizes, numbers, 10, [8, 8], 0, chosen, goals=goals_of(name)).eval()
    # Zeros would hide what is left out. Softmaxes of scores of hundreds lose digits in torch, too.
    std = 0.1 if name in ("autoint", "destine") else 0.3
    generator = torch.Generator().manual_seed(1)
    for parameter in model.network.parameters():
        nn.init.normal_(parameter, 0.0, std, generator)
    exported = export_dense_part(model)
    program, in_onnx = from_json(exported), dense_in_onnx(exported)
    part = DensePart(model)
    for samples in (1, 33):
        rows = torch.randn(samples, 3, 11, generator=generator)
        given = torch.randn(samples, numbers, generator=generator)
        with torch.no_grad():
            expected = part(rows, given)
            assert torch.equal(program(rows, given), expected)
        # Of logits up to 300 the last bits differ.
        largest = max(1.0, expected.abs().amax())
        np.testing.assert_allclose(in_onnx(rows, given), expected, atol=2e-6 * largest, rtol=0)


@pytest.mark.wide
@pytest.mark.parametrize(
    "settings",
    [
        # First-order weights are stored without the scale.
        ["model.first_order_scale=8", "model.dropout=0.5", "model.normalization=layer"],
        pytest.param(None, id="own network"),
    ],
)
def test_a_run_without_vocabularies_takes_rows_of_tables(tmp_path, settings):
    allowed = []
    if settings is None:
        settings, allowed = own_network(tmp_path, "numbers_only", NUMBERS_ONLY), ["--allow-import"]
    run_small(tmp_path, [*settings, "optim.embedding.lr=0.1"])
    run, package = tmp_path / "small", tmp_path / "package"
    status, said = run_command(main, run, package, *allowed)
    assert status == 0 and ("own.py was executed" in said) == bool(allowed), said
    expected = scores(run, ["@run"], tmp_path, *allowed)["score"].to_numpy()[:50]
    drawn = open_test_part(run)
    # The package does not need the network's file.
    (tmp_path / "own.py").unlink(missing_ok=True)
    model = loaded(package)
    assert model.about["first_order_scale"] == (1 if allowed else 8)
    ids = {name: drawn.ids[:, i].numpy() for i, name in enumerate(model.fields)}
    found = model.score_rows(ids, drawn.dense.numpy())
    np.testing.assert_allclose(found, expected, atol=1e-7)
    numbers = {name: drawn.dense[:, i].numpy() for i, name in enumerate(model.numbers)}
    np.testing.assert_allclose(model.score({**ids, **numbers}), expected, atol=1e-7)
    with pytest.raises(ValueError, match="field C1: an id is missing"):
        model.score({**ids, **numbers, "C1": [None] * 50})


class Plain(nn.Module):
    """What users write: in place, constants, sizes, types, buffers, infinities, shared weights."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(10, 2, batch_first=True)
        self.norm = nn.BatchNorm1d(10)
        self.layer = nn.Linear(10, 10)
        self.again = self.layer
        self.gate = nn.ReLU(inplace=True)
        self.register_buffer("order", torch.tensor([1, 0]), persistent=False)

    def forward(self, embeddings, dense):
        found, _ = self.attention(embeddings, embeddings, embeddings, need_weights=False)
        found = self.gate(self.norm(found.sum(1))) + torch.tensor([0.5] * 10)
        found = self.again(self.layer(found))
        found = found.masked_fill(found > 1, float("-inf")).softmax(1).to(torch.float64).float()
        zeros = torch.zeros(embeddings.shape[0] * 2, 10, device=embeddings.device)
        found = found + zeros[: len(found)] + embeddings[:, self.order].mean(1) / len(embeddings)
        return found.sum(1) + dense.sum(1)


def with_network(network):
    """A model's dense part, exported with a network of its own."""
    model = CTRModel("deepfm", {"a": 7, "b": 5}, 2, 10, [8], 0).eval()
    model.network = network.eval()
    return DensePart(model), export_dense_part(model)


@pytest.mark.wide
def test_what_a_network_may_be_written_with():
    part, exported = with_network(Plain())
    program, in_onnx = from_json(exported), dense_in_onnx(exported)
    for samples in (1, 33):
        rows, given = torch.randn(samples, 2, 11), torch.randn(samples, 2)
        with torch.no_grad():
            found = program(rows, given)
            assert torch.equal(found, exported.module()(rows, given, [], []))
            # In evaluation nn.MultiheadAttention itself takes a kernel that rounds differently.
            torch.testing.assert_close(found, part(rows, given), atol=1e-5, rtol=0)
        torch.testing.assert_close(in_onnx(rows, given), found, atol=1e-5, rtol=0)


class Branching(nn.Module):
    """Attention of three dimensions, and branches with constants; packages know no branches."""

    def forward(self, embeddings, dense):
        found = nn.functional.scaled_dot_product_attention(embeddings, embeddings, embeddings)
        branches = (lambda x: x + 0.3), (lambda x: x * 0.7)
        return torch.cond(dense.sum() > 0, *branches, (found.sum((1, 2)),))


@pytest.mark.wide
def test_what_a_network_in_onnx_may_have_besides():
    part, exported = with_network(Branching())
    in_onnx, rows = dense_in_onnx(exported), torch.randn(9, 2, 11)
    for given in (torch.ones(9, 2), -torch.ones(9, 2)):
        with torch.no_grad():
            expected = part(rows, given)
        torch.testing.assert_close(in_onnx(rows, given), expected, atol=1e-5, rtol=0)


class Singular(nn.Module):
    def forward(self, embeddings, dense):
        return torch.linalg.svdvals(embeddings).sum(1) + dense.sum(1)


class Rare(nn.Module):
    def forward(self, embeddings, dense):
        return torch.linalg.det(embeddings[:, :, :2]) + dense.sum(1)


class Deciding(nn.Module):
    def forward(self, embeddings, dense):
        return embeddings.sum((1, 2)) if embeddings.sum() > 0 else dense.sum(1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "network, use, words",
    [
        (Singular(), dense_in_onnx, r"torch.onnx cannot translate aten._linalg_svd.default; use"),
        (Rare(), describe, r"packages do not support the operator 'linalg_det.default'"),
        (Deciding(), describe, r"torch.export cannot export the network Deciding: "),
    ],
)
def test_what_is_not_supported_is_named(network, use, words):
    with pytest.raises(RunFolderError, match=words):
        use(with_network(network)[1])
