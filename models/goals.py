"""Networks with a logit for each of several goals, and the sum of the goals' losses.

Shared-Bottom and MMoE (Ma et al., KDD 2018), PLE (Tang et al., RecSys 2020), ESMM (arXiv
1804.07931).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from stampede.models.mlp import MLP, hidden_layers, linear
from stampede.models.options import MMoEOptions, PLEOptions, SharedBottomOptions
from stampede.models.registry import GoalWeighting, NetworkShape
from stampede.settings import SettingsError


class SharedBottom(nn.Module):
    """ReLU layers that all goals share, and above them an MLP for each goal, its tower."""

    def __init__(
        self, shape: NetworkShape, generator: torch.Generator, options: SharedBottomOptions
    ) -> None:
        super().__init__()
        self.bottom = _hidden(shape.inputs, shape, generator)
        self.towers = _towers(shape, options.tower, generator)

    def forward(self, embeddings: Tensor, dense: Tensor) -> Tensor:
        """Logits `[batch, goals]` from embeddings `[batch, fields, dim]` and numbers."""
        shared = self.bottom(torch.cat([embeddings.flatten(1), dense], 1))
        return _logits(self.towers, [shared] * len(self.towers))


class MMoE(nn.Module):
    """Experts, which are ReLU layers, and for each goal a gate and a tower (eq. 5 to 7).

    A tower's input is the sum of the experts' outputs, weighted by the goal's gate.
    """

    def __init__(
        self, shape: NetworkShape, generator: torch.Generator, options: MMoEOptions
    ) -> None:
        super().__init__()
        self.experts = _experts(options.experts, shape.inputs, shape, generator)
        self.gates = nn.ModuleList(
            Gate(shape.inputs, options.experts, options.gate, shape, generator)
            for _ in range(shape.goals)
        )
        self.towers = _towers(shape, options.tower, generator)

    def forward(self, embeddings: Tensor, dense: Tensor) -> Tensor:
        """Logits `[batch, goals]` from embeddings `[batch, fields, dim]` and numbers."""
        inputs = torch.cat([embeddings.flatten(1), dense], 1)
        outputs = [expert(inputs) for expert in self.experts]
        return _logits(self.towers, [gate(inputs, outputs) for gate in self.gates])


class PLE(nn.Module):
    """Layers of shared experts and of each goal's own (`ExtractionLayer`), then the towers."""

    def __init__(
        self, shape: NetworkShape, generator: torch.Generator, options: PLEOptions
    ) -> None:
        super().__init__()
        widths = [shape.inputs, *[shape.hidden[-1]] * (options.layers - 1)]
        self.layers = nn.ModuleList(
            ExtractionLayer(width, shape, generator, options, number + 1 == options.layers)
            for number, width in enumerate(widths)
        )
        self.towers = _towers(shape, options.tower, generator)

    def forward(self, embeddings: Tensor, dense: Tensor) -> Tensor:
        """Logits `[batch, goals]` from embeddings `[batch, fields, dim]` and numbers."""
        inputs = torch.cat([embeddings.flatten(1), dense], 1)
        found = [inputs] * (len(self.towers) + 1)
        for layer in self.layers:
            found = layer(found)
        return _logits(self.towers, found)


class ExtractionLayer(nn.Module):
    """A layer of PLE: the experts of each goal, shared experts, and their gates (eq. 1 to 6).

    The gate of a goal weighs the goal's experts and the shared ones; the shared gate, which the
    last layer does not need, the shared ones.
    """

    def __init__(
        self,
        inputs: int,
        shape: NetworkShape,
        generator: torch.Generator,
        options: PLEOptions,
        is_last: bool,
    ) -> None:
        super().__init__()
        own, shared = options.goal_experts, options.shared_experts
        self.own = nn.ModuleList(
            _experts(own, inputs, shape, generator) for _ in range(shape.goals)
        )
        self.shared = _experts(shared, inputs, shape, generator)
        gated = [own + shared] * shape.goals + [shared] * (not is_last)
        self.gates = nn.ModuleList(
            Gate(inputs, experts, options.gate, shape, generator) for experts in gated
        )

    def forward(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """`[batch, width]` of each goal, then the shared one, from tensors in that order."""
        shared = [expert(inputs[-1]) for expert in self.shared]
        of_goals = [
            [expert(of_goal) for expert in experts]
            for experts, of_goal in zip(self.own, inputs, strict=False)
        ]
        outputs = [own + shared for own in of_goals] + [shared]
        return [gate(*both) for gate, *both in zip(self.gates, inputs, outputs, strict=False)]


class ESMM(nn.Module):
    """The goals click and conversion on all impressions (eq. 1 and 2).

    One MLP gives the logit of a click, another that of a conversion after a click; both read the
    same embeddings. `combined` multiplies: p(conversion) = p(click) * p(conversion | click).
    """

    def __init__(self, shape: NetworkShape, generator: torch.Generator) -> None:
        super().__init__()
        if shape.goals != 2:
            raise SettingsError(
                f"model.name: found 'esmm', which has two goals, the click and then the "
                f"conversion, but the data have {shape.goals}; write two in the schema, or "
                "model.name: mmoe"
            )
        self.towers = nn.ModuleList(MLP(shape.inputs, shape, generator) for _ in range(2))

    def forward(self, embeddings: Tensor, dense: Tensor) -> Tensor:
        """Logits `[batch, 2]` of a click, and of a conversion after a click."""
        inputs = torch.cat([embeddings.flatten(1), dense], 1)
        return _logits(self.towers, [inputs, inputs])

    @staticmethod
    def combined(logits: Tensor) -> Tensor:
        """Logits `[batch, 2]` of the goals from those of `forward`, biases included."""
        click, after = logits.unbind(1)
        # The logit of sigmoid(a) * sigmoid(b), without rounding a probability to 0 or 1.
        odds_against = torch.stack([-click, -after, -click - after], 1)
        return torch.stack([click, -odds_against.logsumexp(1)], 1)

    @staticmethod
    def separated(shares: Sequence[float]) -> list[float]:
        """The probabilities that `forward` stands for, of goals with these probabilities."""
        return [shares[0], shares[1] / shares[0]]


class Gate(nn.Module):
    """Weights of experts that depend on the input: a softmax over a linear layer."""

    def __init__(
        self,
        inputs: int,
        experts: int,
        hidden: Sequence[int],
        shape: NetworkShape,
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        self.hidden = None
        if hidden:
            self.hidden = _hidden(inputs, replace(shape, hidden=tuple(hidden)), generator)
            inputs = hidden[-1]
        self.weights = linear(inputs, experts, generator, bias=True)

    def forward(self, inputs: Tensor, experts: Sequence[Tensor]) -> Tensor:
        """The weighted sum `[batch, width]` of the experts' outputs."""
        hidden = inputs if self.hidden is None else self.hidden(inputs)
        shares = self.weights(hidden).softmax(1).unsqueeze(2)
        return sum(share * output for share, output in zip(shares.unbind(1), experts, strict=True))


class GoalLosses(nn.Module):
    """The weighted sum of the goals' mean losses.

    With `uncertainty`, training also learns the log variance s of each goal and minimizes
    `sum_g weight_g * exp(-s_g) * loss_g + s_g / 2` (Kendall et al., CVPR 2018, eq. 10).

    Args:
        goals: names of the goals.
        weights: of goals; 1 for others.
    """

    def __init__(
        self, goals: Sequence[str], weights: Mapping[str, float], weighting: GoalWeighting
    ) -> None:
        super().__init__()
        found = torch.tensor([float(weights.get(goal, 1.0)) for goal in goals])
        self.register_buffer("weights", found, persistent=False)
        self.log_variances: nn.Parameter | None = None
        if weighting == "uncertainty":
            self.log_variances = nn.Parameter(torch.zeros(len(goals)))

    def forward(self, losses: Tensor, counts: Tensor, share: float) -> tuple[Tensor, Tensor]:
        """The weighted sum of some samples' losses, and what training minimizes; both scalars.

        Args:
            losses: `[goals]`, the samples' contributions to the mean over the global batch.
            counts: `[goals]`, weights of the samples with that goal in the global batch; a goal
                that no sample has does not change its variance.
            share: of these samples in the global batch.
        """
        weighted = self.weights * losses
        total = weighted.sum()
        if self.log_variances is None:
            return total.detach(), total
        learned = torch.where(counts > 0, self.log_variances, 0.0)
        objective = (weighted * (-learned).exp()).sum() + 0.5 * share * learned.sum()
        return total.detach(), objective


def _hidden(inputs: int, shape: NetworkShape, generator: torch.Generator) -> nn.Module:
    return hidden_layers(inputs, shape.hidden, generator, shape.dropout, shape.normalization)


def _experts(
    count: int, inputs: int, shape: NetworkShape, generator: torch.Generator
) -> nn.ModuleList:
    return nn.ModuleList(_hidden(inputs, shape, generator) for _ in range(count))


def _towers(
    shape: NetworkShape, widths: Sequence[int], generator: torch.Generator
) -> nn.ModuleList:
    of_tower = replace(shape, hidden=tuple(widths))
    return nn.ModuleList(MLP(shape.hidden[-1], of_tower, generator) for _ in range(shape.goals))


def _logits(towers: nn.ModuleList, inputs: Sequence[Tensor]) -> Tensor:
    found = [tower(one) for tower, one in zip(towers, inputs, strict=False)]
    return torch.stack(found, 1)
