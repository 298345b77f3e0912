# pyright: basic
"""A whole CTR model: embedding front, network, first-order term, global bias."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from stampede.models.batch_norm import use_global_batches
from stampede.models.calibration import LogitCalibration
from stampede.models.dropout import draw_by_sample
from stampede.models.embedding_front import EmbeddingFront
from stampede.models.fm_terms import scaled
from stampede.models.goals import GoalLosses
from stampede.models.histories import History, Jagged, tiles
from stampede.models.mlp import is_plain, is_plain_column, linear
from stampede.models.options import AttentionOptions
from stampede.models.registry import GoalWeighting, NetworkShape, Normalization, network
from stampede.models.target_attention import TargetAttention
from stampede.native_library import switched_off
from stampede.settings import Section, SettingsError


class CTRModel(nn.Module):
    """Logit of a click: `bias + first-order term + network(embeddings, numbers)`.

    With several goals, logits of each: a bias for each, and no first-order term.

    The first-order term is `scale * (sum_f w_f[id] + <w, x>)`: a weight per id, stored beside its
    embedding, and `number_weights` for the numbers, if there are any. Adam's step does not depend
    on the size of a gradient, so with Adam the true weights `scale * w` learn `scale` times as fast
    as embeddings, and an `l2` of the stored weights is `l2 / scale**2` of the true ones.

    Embeddings of tables with another width than `dim` are mapped to it by a linear layer without
    bias, a table's own, so that every network sees one width.

    Attributes:
        front: the tables.
        projections: the weights of that layer, `[dim, own width]`, of each such table, as
            `of_TABLE`.
        goals: names of several goals; none of a single label.
        negative_rate: share of the negatives that the training rows are, for `corrected`, which
            what scores with the model applies to its logits.
        network: the network.
        attention: the unit of each field with attention, as `of_FIELD`.
        numbers: number of numeric inputs.
        first_order: whether there is a first-order term.
        first_order_scale: its `scale`.
        calibration: of the logits outside of training.
        goal_losses: the sum of the goals' losses; None for a single label.
        batch_norms: all `nn.BatchNorm1d`, as `GlobalBatchNorm`.

    Args:
        name: registered name of the network.
        vocabulary_sizes: rows of each field's table, by field name.
        numbers: number of numeric inputs.
        dim: width of the embeddings.
        hidden: widths of the MLP's hidden layers.
        seed: of the dense layers' initial weights.
        options: of the network; by default its defaults.
        shared, mean, attention, sequences, dims, weighted: of the fields, see `EmbeddingFront`.
        unit: options of the fields with attention.
        first_order_scale: above 0. The initial scores do not depend on it: the numbers' weights are
            drawn, then stored divided by the scale.
        dropout, normalization: see `NetworkShape`.
        goals: names of several goals; none for a single label.
        goal_weights, goal_weighting: see `GoalLosses`.

    Raises:
        KeyError: there is no network of that name.
        SettingsError: the options or the goals do not fit the data; the network breaks a rule of
            `register`; or it ignores a setting that was changed.
    """

    def __init__(
        self,
        name: str,
        vocabulary_sizes: Mapping[str, int],
        numbers: int,
        dim: int,
        hidden: Sequence[int],
        seed: int,
        options: Section | None = None,
        *,
        shared: Mapping[str, str] | None = None,
        mean: Sequence[str] = (),
        attention: Mapping[str, str] | None = None,
        sequences: Mapping[str, str] | None = None,
        dims: Mapping[str, int] | None = None,
        weighted: Sequence[str] = (),
        unit: AttentionOptions | None = None,
        first_order_scale: float = 1.0,
        dropout: float = 0.0,
        normalization: Normalization = "none",
        goals: Sequence[str] = (),
        goal_weights: Mapping[str, float] | None = None,
        goal_weighting: GoalWeighting = "fixed",
    ) -> None:
        super().__init__()
        registered = network(name)
        registered.check_goals(goals)
        self.front = EmbeddingFront(
            vocabulary_sizes, dim, shared, mean, attention, sequences, dims, weighted
        )
        _check_fits(name, first_order_scale, self.front)
        # Fields of the network, in the order of its histories.
        self.sequences = list(self.front.sequences) if registered.histories else None
        self.numbers, self.goals, self.negative_rate = numbers, list(goals), 1.0
        self.goal_losses = GoalLosses(goals, goal_weights or {}, goal_weighting) if goals else None
        self.first_order, self.first_order_scale = registered.first_order, first_order_scale
        queries = tuple(map(self.front.place, self.front.sequences.values()))
        shape = NetworkShape(
            len(self.front.pooled), dim, numbers, tuple(hidden), dropout, normalization,
            goals=max(1, len(goals)), histories=queries,
        )  # fmt: skip
        self.bias = nn.Parameter(torch.zeros(shape.goals))
        self.calibration = LogitCalibration(shape.goals)
        self._draw_layers(name, shape, options, unit, seed)
        self.batch_norms = [
            norm for part in (self.network, self.attention) for norm in use_global_batches(part)
        ]

    def _draw_layers(
        self,
        name: str,
        shape: NetworkShape,
        options: Section | None,
        unit: AttentionOptions | None,
        seed: int,
    ) -> None:
        """Build the network and the model's own layers, whose weights are drawn in this order."""
        registered, generator = network(name), torch.Generator().manual_seed(seed)
        # The same on every rank, even if a network takes torch's own initial weights.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            self.network = registered.build(shape, generator, options or registered.options())
            self._check_logits(name)
            self._draws = draw_by_sample(self.network)
            self.number_weights: nn.Linear | None = None
            if self.first_order and self.numbers:
                number_weights = linear(self.numbers, 1, generator, bias=False)
                with torch.no_grad():
                    number_weights.weight /= self.first_order_scale
                self.number_weights = number_weights
            unit = unit or AttentionOptions.model_validate({})
            # A field may have the name of a method of ModuleDict.
            self.attention = nn.ModuleDict(
                {
                    f"of_{field}": TargetAttention(shape.dim, unit, generator)
                    for field in self.front.attention
                }
            )
            self.projections = nn.ParameterDict(
                {
                    f"of_{table}": linear(own, shape.dim, generator, bias=False).weight
                    for table, own in self.front.dims.items()
                }
            )

    def l2_terms(self) -> dict[int, float]:
        """Coefficients of the network's own L2 terms, by `id` of the parameter."""
        terms = getattr(self.network, "l2_terms", list)()
        return {id(parameter): coefficient for parameter, coefficient in terms}

    def forward(self, sparse: KeyedJaggedTensor, dense: Tensor) -> Tensor:
        """Logits, see `logits`, from ids and numbers `[batch, numbers]`."""
        rows, histories = self.front.lookup(sparse)
        return self.logits(rows, dense, histories=histories)

    def tiled(
        self,
        sparse: KeyedJaggedTensor,
        dense: Tensor,
        size: int,
        aligned: Callable[[Tensor], Tensor] = lambda values: values,
    ) -> Tensor:
        """As `forward`, with the dense layers on `size` samples at a time.

        Args:
            aligned: applied to their rows and numbers.
        """
        parts = zip(tiles(*self.front.lookup(sparse), size), dense.split(size), strict=True)
        found = [
            self.logits(aligned(rows), aligned(numbers), histories=histories)
            for (rows, histories), numbers in parts
        ]
        return torch.cat(found)

    @property
    def has_dropout(self) -> bool:
        """Whether the network has `nn.Dropout` modules."""
        return self._draws is not None

    def logits(
        self,
        rows: Tensor,
        dense: Tensor,
        keys: Tensor | None = None,
        histories: Mapping[str, History] | None = None,
    ) -> Tensor:
        """Logits from looked-up rows and histories, see `LookedUp`, and numbers.

        They are `[batch]`, or `[batch, goals]` with several goals; calibrated, but in training.

        A sample's logit depends on that sample alone, except by batch norm in training.

        Args:
            keys: `[batch]` int64, from which dropout draws the masks of each sample, see
                `sample_keys`; by default they come from torch's generator.
        """
        if self._draws is not None:
            self._draws.begin(keys)
        if len(self.projections):
            rows, histories = self._of_one_width(rows, histories or {})
        if histories:
            rows = self._attended(rows, histories)
        logits = self._uncalibrated(rows, dense, histories)
        return logits if self.training else self.calibration(logits)

    def _uncalibrated(
        self, rows: Tensor, dense: Tensor, histories: Mapping[str, History] | None
    ) -> Tensor:
        scale = self.first_order_scale
        if self._network_adds_first_order():
            stored, dim = self.front.stored(rows), self.front.columns.dim
            weights = None if self.number_weights is None else self.number_weights.weight
            network: Any = self.network
            return network.with_first_order(stored, dim, dense, weights, scale) + self.bias
        embeddings, id_weights = self.front.split(rows)
        given: list[Any] = [embeddings, dense]
        if self.sequences is not None and histories is not None:
            dim = self.front.columns.dim
            given.append([histories[field].columns(0, dim) for field in self.sequences])
        logits = self.network(*given) + self.bias
        if self.goal_losses is not None:
            combined = getattr(self.network, "combined", None)
            return logits if combined is None else combined(logits)
        if self.first_order:
            logits = logits + scaled(id_weights.sum(1), scale)
        if self.number_weights is not None:
            logits = logits + scaled(self.number_weights(dense).squeeze(1), scale)
        return logits

    def _of_one_width(
        self, rows: Tensor, histories: Mapping[str, History]
    ) -> tuple[Tensor, Mapping[str, History]]:
        """Rows and histories as if all tables had the width `dim`."""
        parts = zip(self.front.pooled, rows.split(self.front.widths, 1), strict=True)
        together = torch.cat([self._projected(field, part) for field, part in parts], 1)
        return together, {
            field: history.holding(self._projected(field, history.values))
            for field, history in histories.items()
        }

    def _projected(self, field: str, rows: Tensor) -> Tensor:
        """Stored rows `[..., width]` of a field as those of a table of the width `dim`."""
        table, columns = self.front.table_of[field], self.front.columns
        if table not in self.front.dims:
            return rows
        embedding, first_order = self.front.columns_of(field).split(rows)
        weight = self.projections[f"of_{table}"]
        projected = functional.linear(embedding, weight).to(rows.dtype)
        padding = columns.stored - columns.dim - 1
        return functional.pad(torch.cat([projected, first_order], -1), [0, padding])

    def _attended(self, rows: Tensor, histories: Mapping[str, History]) -> Tensor:
        """Rows with what the queries of the fields with attention attend to."""
        front = self.front
        stored = list(front.stored(rows).unbind(1))
        for field, query in front.attention.items():
            embedding = stored[front.place(query)][:, : front.columns.dim]
            attended = self.attention[f"of_{field}"](embedding, histories[field])
            stored[front.place(field)] = attended
        return torch.cat(stored, 1)

    def _network_adds_first_order(self) -> bool:
        """Whether the network can add the term itself, and no hook relies on separate modules."""
        return (
            self.first_order
            and _has_own_first_order(self.network)
            and is_plain(self.network, type(self.network))
            and (self.number_weights is None or is_plain_column(self.number_weights))
        )

    def _check_logits(self, name: str) -> None:
        """Refuse a network that fails, changes its inputs, or whose logits would broadcast.

        A copy is tried, in evaluation and in training.
        """
        samples, numbers, columns = 2, self.numbers, self.front.columns
        fields, network = len(self.front.pooled), copy.deepcopy(self.network)
        goals = [] if self.goal_losses is None else [len(self.bias)]
        methods: dict[str, tuple[str, int, tuple[Any, ...]]] = {
            "forward": ("embeddings", columns.dim, ())
        }
        if self.first_order and _has_own_first_order(network):
            weights = torch.zeros(1, numbers) if numbers else None
            more = (weights, self.first_order_scale)
            methods["with_first_order"] = ("stored", columns.stored, more)
        for training in (False, True):
            network.train(training)
            for method, (rows, width, more) in methods.items():
                inputs = torch.zeros(samples, fields, width), torch.zeros(samples, numbers)
                # torch counts changes: changed zeros may still be zeros.
                before = [tensor._version for tensor in inputs]
                given = (inputs[0], columns.dim, inputs[1], *more) if more else inputs
                if self.sequences is not None:
                    ids = Jagged(torch.zeros(3, columns.dim), torch.tensor([3, 0]))
                    given = (*given, [ids] * len(self.sequences))
                try:
                    # Without our kernels, as the model may be for a GPU.
                    with torch.no_grad(), switched_off():
                        logits = getattr(network, method)(*given)
                except Exception as failure:
                    raise SettingsError(
                        f"model.name: the network {name!r} fails for {rows} [{samples}, {fields}, "
                        f"{width}] and numbers [{samples}, {numbers}]: {type(failure).__name__}: "
                        f"{failure}; correct its {method}"
                    ) from failure
                found = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
                if found != [samples, *goals]:
                    shape = ", ".join(map(str, ("batch", *goals)))
                    raise SettingsError(
                        f"model.name: the network {name!r} returns {found} for {samples} samples; "
                        f"its {method} must return logits of shape [{shape}], one per "
                        f"{'goal' if goals else 'sample'}"
                    )
                for key, tensor, version in zip((rows, "numbers"), inputs, before, strict=True):
                    if tensor._version != version:
                        raise SettingsError(
                            f"model.name: the network {name!r} changes its {key} in place; its "
                            f"{method} must not: write for example `x = {key} * 2` instead of "
                            f"`{key}.mul_(2)`, and do not use inplace=True on them"
                        )


def _check_fits(name: str, first_order_scale: float, front: EmbeddingFront) -> None:
    """Refuse a network without a first-order term that is scaled, or that cannot read histories."""
    registered = network(name)
    if first_order_scale != 1.0 and not registered.first_order:
        raise SettingsError(
            f"model.first_order_scale: found {first_order_scale:g}, but the network {name!r} "
            "has no first-order term; leave the key out, or choose a network that has one, "
            "such as deepfm"
        )
    if front.sequences and not registered.histories:
        raise SettingsError(
            f"model.name: the network {name!r} cannot read the ids of "
            f"{', '.join(front.sequences)} one by one (pooling: none); write pooling: "
            "attention in the schema, or choose a network that can, such as bst"
        )


def _has_own_first_order(network: nn.Module) -> bool:
    """Whether its `with_first_order` belongs to its `forward`: no subclass overrides the latter."""
    for kind in type(network).__mro__:
        if "with_first_order" in vars(kind):
            return True
        if "forward" in vars(kind):
            return False
    return False
