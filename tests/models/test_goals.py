"""Networks of several goals and the sum of losses, against the papers' formulas in float64."""

import math

import numpy as np
import pytest
import torch
from torch.nn import functional

from stampede.models import CTRModel, network, register
from stampede.models.goals import ESMM, GoalLosses
from stampede.models.registry import _NETWORKS
from stampede.settings import SettingsError

GOALS = ["click", "cart", "buy"]
SIZES = {"C1": 5, "C2": 7}
DIM, NUMBERS, HIDDEN, BATCH = 3, 2, [6, 4], 9


def random_model(name, goals, options=None, **more):
    """A model in float64 with random weights, and samples."""
    draw = torch.Generator().manual_seed(1)
    checked = network(name).options.model_validate(options or {})
    model = CTRModel(name, SIZES, NUMBERS, DIM, HIDDEN, 0, checked, goals=goals, **more).double()
    with torch.no_grad():
        for parameter in [*model.network.parameters(), model.bias]:
            parameter.copy_(torch.randn(parameter.shape, generator=draw, dtype=torch.float64))
    rows = torch.randn(BATCH, 2, model.front.columns.stored, generator=draw, dtype=torch.float64)
    return model, rows, torch.randn(BATCH, NUMBERS, generator=draw, dtype=torch.float64)


class Reference:
    """The formulas, from leaves that are copies of a model's weights."""

    def __init__(self, model):
        self.weights = {
            name: p.detach().clone().requires_grad_()
            for name, p in model.named_parameters()
            if not name.startswith("front.")
        }

    def dense(self, at, x):
        weight, bias = self.weights[f"{at}.weight"], self.weights.get(f"{at}.bias")
        found = torch.einsum("bi,oi->bo", x, weight)
        return found if bias is None else found + bias

    def relu(self, at, x):
        """f(x), a stack of layers with ReLU."""
        number = 0
        while f"{at}._mlp.{number}._linear.weight" in self.weights:
            x = self.dense(f"{at}._mlp.{number}._linear", x).clamp(min=0)
            number += 1
        assert number
        return x

    def mlp(self, at, x):
        return self.dense(f"{at}.output", self.relu(f"{at}.hidden", x))[:, 0]

    def gate(self, at, x):
        if f"{at}.hidden._mlp.0._linear.weight" in self.weights:
            x = self.relu(f"{at}.hidden", x)
        exps = torch.exp(self.dense(f"{at}.weights", x))
        return exps / exps.sum(1, keepdim=True)

    def mixed(self, at, x, experts):
        gate = self.gate(at, x)
        return sum(gate[:, i, None] * expert for i, expert in enumerate(experts))

    def towers(self, inputs):
        found = [self.mlp(f"network.towers.{k}", x) for k, x in enumerate(inputs)]
        return torch.stack(found, 1) + self.weights["bias"]

    def shared_bottom(self, x, goals, options):
        """y_k = h_k(f(x)) (MMoE paper, eq. 1)."""
        return self.towers([self.relu("network.bottom", x)] * goals)

    def mmoe(self, x, goals, options):
        """y_k = h_k(sum_i g_k(x)_i f_i(x)) (eq. 5 to 7)."""
        experts = [self.relu(f"network.experts.{i}", x) for i in range(options.get("experts", 4))]
        return self.towers([self.mixed(f"network.gates.{k}", x, experts) for k in range(goals)])

    def ple(self, x, goals, options):
        """g_k(x) = w_k(x) S_k(x) with the experts of goal k and the shared ones (eq. 1 to 7)."""
        before = [x] * (goals + 1)
        own, shared = (options.get(key, 1) for key in ("goal_experts", "shared_experts"))
        layers = options.get("layers", 2)
        for layer in range(layers):
            at = f"network.layers.{layer}"
            common = [self.relu(f"{at}.shared.{i}", before[goals]) for i in range(shared)]
            after = []
            for k in range(goals):
                of_goal = [self.relu(f"{at}.own.{k}.{i}", before[k]) for i in range(own)]
                after.append(self.mixed(f"{at}.gates.{k}", before[k], of_goal + common))
            if layer + 1 < layers:
                after.append(self.mixed(f"{at}.gates.{goals}", before[goals], common))
            before = after
        return self.towers(before)

    def esmm(self, x, goals, options):
        """p(ctcvr) = p(ctr) p(cvr) (eq. 2)."""
        ctr, cvr = torch.sigmoid(self.towers([x, x])).unbind(1)
        return torch.logit(torch.stack([ctr, ctr * cvr], 1))


@pytest.mark.parametrize(
    "name, goals, options",
    [
        ("shared_bottom", GOALS, {"tower": [5, 3]}),
        ("mmoe", GOALS, {"experts": 3, "tower": [5]}),
        ("mmoe", GOALS[:2], {"gate": [4], "tower": [5]}),
        ("ple", GOALS, {"tower": [5], "goal_experts": 2}),
        ("ple", GOALS[:2], {"layers": 1, "shared_experts": 2, "gate": [4]}),
        ("ple", GOALS[:2], {"layers": 3}),
        ("esmm", GOALS[:2], {}),
    ],
)
def test_logits_and_gradients(name, goals, options):
    model, rows, numbers = random_model(name, goals, options)
    rows.requires_grad_()
    found = model.logits(rows.flatten(1), numbers)
    reference = Reference(model)
    copies = rows.detach().clone().requires_grad_()
    inputs = torch.cat([copies[..., :DIM].flatten(1), numbers], 1)
    expected = getattr(reference, name)(inputs, len(goals), options)
    assert found.shape == (BATCH, len(goals))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    # Any direction of the logits.
    direction = torch.cos(torch.arange(found.numel(), dtype=torch.float64)).view_as(found)
    (found * direction).sum().backward()
    (expected * direction).sum().backward()
    torch.testing.assert_close(rows.grad, copies.grad, rtol=1e-8, atol=1e-9)
    of_model = dict(model.named_parameters())
    assert len(reference.weights) == sum(not name.startswith("front.") for name in of_model)
    for key, leaf in reference.weights.items():
        torch.testing.assert_close(of_model[key].grad, leaf.grad, rtol=1e-8, atol=1e-9, msg=key)
        assert leaf.grad.abs().max() > 0, key


def test_esmm_keeps_small_probabilities_apart():
    logits = torch.tensor([[-40.0, -50.0], [-3.0, 60.0], [60.0, 60.0]])
    found = ESMM.combined(logits)
    assert torch.equal(found[:, 0], logits[:, 0])
    # log odds of p q: p q / (1 - p q), where p = exp(-40), q = exp(-50) and so on.
    expected = [-90.0, -3.0, 60.0 - math.log(2)]
    np.testing.assert_allclose(found[:, 1], expected, rtol=1e-6)


def test_esmm_begins_at_the_shares():
    shares = [0.2, 0.03]
    biases = torch.logit(torch.tensor([ESMM.separated(shares)], dtype=torch.float64))
    np.testing.assert_allclose(ESMM.combined(biases).sigmoid(), [shares], rtol=1e-12)


@pytest.mark.parametrize("weighting", ["fixed", "uncertainty"])
def test_weights_of_losses(weighting):
    """Kendall et al., eq. 10: sum_g w_g L_g / sigma_g^2 + log sigma_g."""
    losses = torch.tensor([0.5, 0.2, 0.1], dtype=torch.float64, requires_grad=True)
    counts, module = torch.tensor([3.0, 1.0, 0.0]), GoalLosses(GOALS, {"cart": 4.0}, weighting)
    module = module.double()
    if weighting == "uncertainty":
        sigmas = np.array([0.5, 2.0, 3.0])
        with torch.no_grad():
            module.log_variances.copy_(torch.from_numpy(np.log(sigmas**2)))
    total, objective = module(losses, counts, 0.25)
    weighted = np.array([1.0, 4.0, 1.0]) * losses.detach().numpy()
    assert total.item() == pytest.approx(weighted.sum())
    objective.backward()
    if weighting == "fixed":
        assert objective.item() == pytest.approx(weighted.sum())
        np.testing.assert_allclose(losses.grad, [1, 4, 1])
        return
    # No sample of the batch has the last goal, and a quarter of the batch is given here.
    sigmas = np.array([0.5, 2.0, 1.0])
    expected = (weighted / sigmas**2).sum() + 0.25 * np.log(sigmas).sum()
    assert objective.item() == pytest.approx(expected)
    # d/ds of w exp(-s) L + s/2, with s = log sigma^2.
    gradient = -weighted / sigmas**2 + 0.25 * 0.5
    np.testing.assert_allclose(module.log_variances.grad, [*gradient[:2], 0.0])


@pytest.mark.parametrize(
    "name, goals, words",
    [
        ("deepfm", GOALS, "'deepfm', which has one logit, but the data have the goals click, cart"),
        ("mmoe", [], "'mmoe', which is for several goals, but the data have one label; write"),
        ("esmm", GOALS, "'esmm', which has two goals, .* but the data have 3; write two in the"),
    ],
)
def test_a_network_that_does_not_go_with_the_goals(name, goals, words):
    with pytest.raises(SettingsError, match=f"model.name: found {words}"):
        CTRModel(name, SIZES, NUMBERS, DIM, HIDDEN, 0, goals=goals)


def test_a_network_of_the_users_own(monkeypatch):
    monkeypatch.setattr("stampede.models.registry._NETWORKS", dict(_NETWORKS))

    class Own(torch.nn.Module):
        def __init__(self, shape, generator):
            super().__init__()
            self.layer = torch.nn.Linear(shape.inputs, shape.goals)

        def forward(self, embeddings, dense):
            return self.layer(torch.cat([embeddings.flatten(1), dense], 1))

    register("own", goals=True)(Own)
    model, rows, numbers = random_model("own", GOALS)
    inputs = torch.cat([rows[..., :DIM].flatten(1), numbers], 1)
    expected = functional.linear(inputs, *model.network.parameters()) + model.bias
    torch.testing.assert_close(model.logits(rows.flatten(1), numbers), expected)

    def one_logit(self, embeddings, dense):
        return embeddings.sum((1, 2))

    register("broken", goals=True)(type("Broken", (Own,), {"forward": one_logit}))
    with pytest.raises(SettingsError, match=r"returns \[2\] for 2 samples; .* \[batch, 3\], one"):
        random_model("broken", GOALS)
    with pytest.raises(SettingsError, match="found first_order and goals"):
        register("both", goals=True, first_order=True)
