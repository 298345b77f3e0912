"""What holds for every network, whatever its options."""

import pytest
import torch
from torch import nn

from stampede.models import CTRModel, NetworkShape, network, register
from stampede.models.deepfm import DeepFM
from stampede.models.dropout import sample_keys
from stampede.models.mlp import hidden_layers
from stampede.models.registry import _NETWORKS
from stampede.settings import SettingsError
from support.networks import VARIANTS, goals_of, variant_id

USES_REGISTRY = pytest.mark.usefixtures("registered")
EVERY_VARIANT = pytest.mark.parametrize("name, options", VARIANTS, ids=variant_id)
SIZES = {"C1": 5, "C2": 7, "C3": 3}


def model(name, options=None, numbers=2, sizes=SIZES, seed=0, hidden=(8, 6), **more):
    checked = network(name).options.model_validate(options or {})
    return CTRModel(name, sizes, numbers, 4, hidden, seed, checked, goals=goals_of(name), **more)


def samples_of(built, numbers=2):
    return torch.randn(5, 3 * built.front.columns.stored), torch.randn(5, numbers)


def dense_weights(built):
    return {name: p for name, p in built.named_parameters() if not name.startswith("front.")}


@EVERY_VARIANT
@pytest.mark.parametrize("numbers", [0, 2])
def test_a_logit_depends_on_its_sample_alone(name, options, numbers):
    built = model(name, options, numbers)
    rows, dense = samples_of(built, numbers)
    together = built.logits(rows, dense)
    assert together.shape == (5, 2)[: 1 + network(name).goals] and together.std() > 0
    alone = [built.logits(rows[i : i + 1], dense[i : i + 1]) for i in range(5)]
    torch.testing.assert_close(torch.cat(alone), together, rtol=1e-5, atol=1e-5)


@EVERY_VARIANT
def test_the_seed_alone_decides_the_initial_weights(name, options):
    torch.manual_seed(1)
    one = dense_weights(model(name, options))
    torch.manual_seed(2)
    drawn = torch.get_rng_state()
    other = dense_weights(model(name, options))
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(weight, other[key]) for key, weight in one.items())
    changed = dense_weights(model(name, options, seed=3))
    for key, weight in one.items():
        if weight.ndim > 1 and "norm" not in key and "bias" not in key:
            assert not torch.equal(weight, changed[key])


@EVERY_VARIANT
def test_kernels_start_as_glorot_normal_and_biases_as_zeros(name, options):
    built = model(name, options, hidden=(64, 64))
    for key, weight in dense_weights(built).items():
        if "norm" in key:
            assert torch.equal(weight, torch.full_like(weight, float("weight" in key)))
        elif "bias" in key:
            assert weight.abs().max() == 0
        elif weight.numel() > 500:
            fans = sum(weight.shape[-2:]) * weight[..., 0, 0].numel()
            assert weight.std().item() == pytest.approx((2 / fans) ** 0.5, rel=0.1), key


@EVERY_VARIANT
def test_a_scale_of_the_first_order_term(name, options):
    """Weights that are as much smaller give the same logits, which start the same."""
    one = model(name, options)
    if not one.first_order:
        with pytest.raises(SettingsError, match="has no first-order term; leave the key out"):
            model(name, options, first_order_scale=8.0)
        return
    other = model(name, options, first_order_scale=8.0)
    columns, dense = one.front.columns, torch.randn(5, 2)
    rows = torch.randn(5, 3, columns.stored)
    smaller = rows.clone()
    smaller[..., columns.dim] /= 8
    for needs_grad in (True, False):
        with torch.set_grad_enabled(needs_grad):
            expected = one.logits(rows.flatten(1).requires_grad_(needs_grad), dense)
            found = other.logits(smaller.flatten(1).requires_grad_(needs_grad), dense)
        torch.testing.assert_close(found, expected)
    torch.testing.assert_close(other.number_weights.weight * 8, one.number_weights.weight)


def _has_mlp(name, options):
    """Whether it has layers of the widths model.hidden."""
    if name in ("autoint", "destine"):
        return options.get("deep", False)
    return name not in ("lr", "fm")


@pytest.mark.parametrize(
    "name, options", [*VARIANTS, ("destine", {"att_dropout": 0.5})], ids=variant_id
)
def test_dropout_in_training_only(name, options):
    if "att_dropout" in options:
        plain, dropping = model(name), model(name, options)
    elif _has_mlp(name, options):
        plain, dropping = model(name, options), model(name, options, dropout=0.5)
    else:
        with pytest.raises(SettingsError, match=f"model.dropout: found 0.5, .* {name!r} ignores "):
            model(name, options, dropout=0.5)
        return
    rows, dense = samples_of(plain)
    rows.requires_grad_()
    assert not torch.equal(dropping.logits(rows, dense), dropping.logits(rows, dense))
    # However the batch is cut, as on several ranks.
    keys = sample_keys(1, 2, torch.arange(5))
    whole = dropping.logits(rows, dense, keys)
    assert not torch.allclose(
        whole, dropping.logits(rows, dense, sample_keys(1, 3, torch.arange(5)))
    )
    cuts = (slice(0, 1), slice(1, 3), slice(3, 5))
    parts = [dropping.logits(rows[cut], dense[cut], keys[cut]) for cut in cuts]
    torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-4, atol=1e-5)
    # The same weights under the same names.
    assert list(dropping.state_dict()) == list(plain.state_dict())
    found = dropping.eval().logits(rows, dense)
    torch.testing.assert_close(found, plain.eval().logits(rows, dense))


@pytest.mark.parametrize("kind", ["layer", "batch"])
@EVERY_VARIANT
def test_a_norm_before_each_relu(name, options, kind):
    if not _has_mlp(name, options) or options.get("structure") == "serial":
        with pytest.raises(SettingsError, match=f"normalization: found .* {name!r} ignores "):
            model(name, options, normalization=kind)
        return
    plain, normed = model(name, options), model(name, options, normalization=kind)
    # The weights of the other layers are those they were.
    weights = normed.state_dict()
    assert all(torch.equal(weights[key], was) for key, was in dense_weights(plain).items())
    parameters = dict(normed.named_parameters()).keys()
    new = {tuple(weights[key].shape) for key in parameters - plain.state_dict().keys()}
    # The layers of towers and gates, too.
    others = {(width,) for key in ("tower", "gate") for width in options.get(key, [])}
    assert {(8,), (6,)} <= new <= {(8,), (6,), (64,), *others}
    rows, dense = samples_of(plain)
    assert not torch.allclose(normed.logits(rows, dense), plain.logits(rows, dense))


def test_the_numbers_of_wukong_are_one_more_vector():
    """As with a field more, whose embedding is an MLP of the numbers."""
    one = model("wukong", {"bottom": [5]})
    other = model("wukong", {"bottom": None}, 0, SIZES | {"C4": 2})
    state = dense_weights(one)
    rest = {name: weight for name, weight in state.items() if ".numbers." not in name}
    assert not other.load_state_dict(rest, strict=False).unexpected_keys
    embeddings, dense = torch.randn(5, 3, 4), torch.randn(5, 2)
    vector = dense
    for layer in (0, 1):
        at = f"network.numbers.mlp._mlp.{layer}._linear"
        nn.init.normal_(state[f"{at}.bias"])
        vector = (vector @ state[f"{at}.weight"].T + state[f"{at}.bias"]).clamp(min=0)
    assert vector.std() > 0.1
    expected = other.network(torch.cat([embeddings, vector.unsqueeze(1)], 1), dense[:, :0])
    torch.testing.assert_close(one.network(embeddings, dense), expected)


def test_hidden_layers_with_layer_norm_and_dropout_against_float64():
    layers = hidden_layers(5, [4, 3], torch.Generator().manual_seed(0), 0.25, "layer")
    torch.manual_seed(0)
    inputs = torch.randn(70, 5)
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.copy_(torch.randn_like(parameter))
    for training in (True, False):
        layers.train(training)
        torch.manual_seed(7)
        found = layers(inputs.requires_grad_())
        torch.manual_seed(7)
        x = inputs.detach().double()
        for name in ("0", "1"):
            layer = layers.get_submodule(f"_mlp.{name}")
            norm = layer._activation_fn[0]
            z = x @ layer._linear.weight.double().T + layer._linear.bias.double()
            z = (z - z.mean(1, keepdim=True)) / (z.var(1, keepdim=True, correction=0) + 1e-5).sqrt()
            x = (z * norm.weight.double() + norm.bias.double()).clamp(min=0)
            if training:
                # What torch draws for float32.
                x = x * nn.functional.dropout(torch.ones(x.shape), 0.25)
        torch.testing.assert_close(found.double(), x, rtol=1e-4, atol=1e-5)
        assert (found == 0).double().mean() > (0.5 if training else 0.3)


@pytest.fixture
def registered(monkeypatch):
    """Networks that are registered during the test are gone after it."""
    monkeypatch.setattr("stampede.models.registry._NETWORKS", dict(_NETWORKS))


class Mean(nn.Module):
    """Uses torch's own initial weights."""

    def __init__(self, shape: NetworkShape, generator):
        super().__init__()
        self.layer = nn.Linear(shape.dim, 1)
        self.drop = nn.Dropout()

    def forward(self, embeddings, dense):
        return self.layer(self.drop(embeddings.mean(1))).squeeze(1)


@USES_REGISTRY
def test_a_network_of_the_users_own():
    register("mean")(Mean)
    # Torch's own initial weights depend on the seed alone.
    torch.manual_seed(1)
    one = model("mean").network
    torch.manual_seed(2)
    assert torch.equal(model("mean").network.layer.weight, one.layer.weight)
    assert not torch.equal(model("mean", seed=1).network.layer.weight, one.layer.weight)
    assert one.training
    with pytest.raises(SettingsError, match=r"'mean' ignores it \(it never reads"):
        model("mean", dropout=0.5)

    def build(self, shape, generator):
        Mean.__init__(self, shape, generator)
        self.drop = nn.Dropout(shape.dropout)

    register("asking")(type("Asking", (Mean,), {"__init__": build}))
    assert model("asking", dropout=0.5).network.drop.p == 0.5
    with pytest.raises(SettingsError, match=r"model\.normalization: found layer"):
        model("asking", normalization="layer")


def test_gates_of_experts_start_as_glorot_uniform():
    built = model("dcnv2", sizes={f"C{i}": 2 for i in range(100)})
    gate = built.network.cross.gates[2].weight
    largest = (6 / (402 + 1)) ** 0.5
    assert 0.9 * largest < gate.abs().max() <= largest
    assert gate.std().item() == pytest.approx(largest / 3**0.5, rel=0.1)


def test_l2_is_for_the_matrices_of_cross_layers():
    def decaying(name, **options):
        built = model(name, options)
        names = {id(p): key.removeprefix("network.cross.") for key, p in built.named_parameters()}
        return {names[at]: value for at, value in built.l2_terms().items()}

    assert decaying("dcn", layers=2) == {"kernels.0": 1e-5, "kernels.1": 1e-5}
    assert decaying("dcnv2", layers=1, l2=0.1) == {f"{m}_kernels.0": 0.1 for m in "UVC"}
    assert decaying("dcnv2", layers=1, cross="full") == {"kernels.0": 1e-5}
    assert decaying("deepfm") == {}


@pytest.mark.parametrize(
    "name, options, sizes, numbers, words",
    [
        ("finalmlp", {"heads": 4}, SIZES, 2, "model.hidden: its last width, 6, is not divisible"),
        ("finalmlp", {"heads": 3, "second": [6, 5]}, SIZES, 2, "model.options.second: its last"),
        ("dlrm", {}, {"C1": 5}, 0, "one id field and no numbers"),
    ],
)
def test_options_that_do_not_go_with_the_shape(name, options, sizes, numbers, words):
    with pytest.raises(SettingsError, match=words):
        model(name, options, numbers, sizes)


@USES_REGISTRY
@pytest.mark.parametrize(
    "base, method, changed, words",
    [
        (Mean, "forward", lambda self, e, d: self.layer(e.mean(1)), r"returns \[2, 1\] for 2 "),
        (Mean, "forward", lambda self, e, d: None, "returns NoneType for 2 samples"),
        (Mean, "forward", lambda self, e, d: e @ d, r"fails for .* \[2, 3, 4\].*: RuntimeError: "),
        (Mean, "__init__", lambda self: None, r"built with \(shape, generator\): TypeError"),
        (DeepFM, "with_first_order", lambda self, stored, dim, numbers, number_weights: stored,
         r"'broken' fails for stored .*positional arg"),
        (DeepFM, "with_first_order", lambda *given: DeepFM.with_first_order(*given).unsqueeze(1),
         r"returns \[2, 1\] .* must return"),
    ],
)  # fmt: skip
def test_a_network_that_cannot_be_used_is_refused(base, method, changed, words):
    kind = type("Broken", (base,), {method: changed})
    register("broken", first_order=base is DeepFM)(kind)
    with pytest.raises(SettingsError, match=words):
        model("broken")


@USES_REGISTRY
def test_names_and_options_are_checked():
    with pytest.raises(SettingsError, match=r"register\('deepfm'\).*stampede.models.deepfm"):
        register("deepfm")(Mean)
    with pytest.raises(SettingsError, match=r"write a name"):
        register(Mean)
    register("mean")(Mean)
    register("mean")(Mean)
    with pytest.raises(KeyError, match=r"no network 'maen'; write one of .*mean"):
        network("maen")
