"""A whole CTR model: embedding front, network, first-order term, global bias."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from stampede.models.embedding_front import EmbeddingFront, StoredColumns
from stampede.models.mlp import is_one_column, is_plain, linear
from stampede.models.registry import NetworkShape, network
from stampede.native import switched_off
from stampede.settings import Section, SettingsError


class CTRModel(nn.Module):
    """Logit of a click: `bias + first-order term + network(embeddings, numbers)`.

    The first-order term is `sum_f w_f[id] + <w, x>`: a weight per id, stored beside its embedding,
    and `number_weights` for the numbers where there are any.

    Attributes:
        front: the tables.
        network: the network.
        numbers: number of numeric inputs.

    Args:
        name: registered name of the network.
        vocabulary_sizes: rows of each field's table, by field name.
        numbers: number of numeric inputs.
        dim: width of the embeddings.
        hidden: widths of the MLP's hidden layers.
        seed: seed of the dense layers' initial weights.
        options: of the network; by default its defaults.

    Raises:
        KeyError: there is no network of that name.
        SettingsError: the options do not go with the data; or the network does not do what
            `register` asks for.
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
    ) -> None:
        super().__init__()
        registered = network(name)
        generator = torch.Generator().manual_seed(seed)
        self.front = EmbeddingFront(vocabulary_sizes, dim)
        self.numbers = numbers
        shape = NetworkShape(len(vocabulary_sizes), dim, numbers, tuple(hidden))
        self.bias = nn.Parameter(torch.zeros(1))
        self.number_weights: nn.Linear | None = None
        self.first_order = registered.first_order
        # The same on every rank, also where a network takes torch's own initial weights.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            self.network = registered.build(shape, generator, options or registered.options())
            _check_logits(name, self.network, shape)
            if registered.first_order and _has_own_first_order(self.network):
                _check_logits(name, self.network, shape, with_first_order=True)
            if registered.first_order and numbers:
                self.number_weights = linear(numbers, 1, generator, bias=False)

    def l2_terms(self) -> dict[int, float]:
        """Coefficients of the network's own L2 terms, by `id` of the parameter."""
        terms = getattr(self.network, "l2_terms", list)()
        return {id(parameter): coefficient for parameter, coefficient in terms}

    def forward(self, sparse: KeyedJaggedTensor, dense: Tensor) -> Tensor:
        """Logits `[batch]` from ids and numbers `[batch, numbers]`."""
        return self.logits(self.front.lookup(sparse), dense)

    def logits(self, rows: Tensor, dense: Tensor) -> Tensor:
        """Logits `[batch]` from looked-up rows, see `EmbeddingFront.lookup`, and numbers.

        A sample's logit depends on that sample alone.
        """
        if self._network_adds_first_order():
            stored, dim = self.front.stored(rows), self.front.columns.dim
            weights = None if self.number_weights is None else self.number_weights.weight
            return self.network.with_first_order(stored, dim, dense, weights) + self.bias
        embeddings, id_weights = self.front.split(rows)
        logits = self.network(embeddings, dense) + self.bias
        if self.first_order:
            logits = logits + id_weights.sum(1)
        if self.number_weights is not None:
            logits = logits + self.number_weights(dense).squeeze(1)
        return logits

    def _network_adds_first_order(self) -> bool:
        """Whether it can, and nobody waits for a module to be called instead."""
        network, weights = self.network, self.number_weights
        return (
            self.first_order
            and _has_own_first_order(network)
            and is_plain(network, type(network))
            and (weights is None or (is_plain(weights, nn.Linear) and is_one_column(weights)))
        )


def _has_own_first_order(network: nn.Module) -> bool:
    """Whether its `with_first_order` is that of its `forward`, not of a class it overrides."""
    for kind in type(network).__mro__:
        if "with_first_order" in vars(kind):
            return True
        if "forward" in vars(kind):
            return False
    return False


class _WithFirstOrder(nn.Module):
    """Calls a network's `with_first_order`."""

    def __init__(self, network: nn.Module, dim: int) -> None:
        super().__init__()
        self.network, self._dim = network, dim

    def forward(self, rows: Tensor, numbers: Tensor) -> Tensor:
        count = numbers.shape[1]
        weights = numbers.new_zeros(1, count) if count else None
        return self.network.with_first_order(rows, self._dim, numbers, weights)


def _check_logits(
    name: str, network: nn.Module, shape: NetworkShape, *, with_first_order: bool = False
) -> None:
    """Refuse a network that cannot be called, changes its inputs, or whose logits would broadcast.

    It is tried as it is evaluated and as it is trained; its weights and buffers are left alone.

    Args:
        with_first_order: whether its method of that name is called instead of `forward`.
    """
    samples, rows = 2, "embeddings"
    module, width, method = network, shape.dim, "forward"
    if with_first_order:
        module, method = _WithFirstOrder(network, shape.dim), "with_first_order"
        rows, width = "stored", StoredColumns(shape.dim).stored
    was_training = module.training
    for training in (False, True):
        module.train(training)
        inputs = {
            rows: torch.zeros(samples, shape.fields, width),
            "numbers": torch.zeros(samples, shape.numbers),
        }
        # Counted by torch: zeros may be zeros still after they were changed.
        before = {key: tensor._version for key, tensor in inputs.items()}
        state = {key: buffer.clone() for key, buffer in module.named_buffers()}
        try:
            # The kernels may not be needed: the model may be for a GPU.
            with torch.no_grad(), switched_off():
                logits = functional_call(module, state, tuple(inputs.values()))
        except Exception as failure:
            raise SettingsError(
                f"model.name: the network {name!r} fails for {rows} [{samples}, "
                f"{shape.fields}, {width}] and numbers [{samples}, {shape.numbers}]: "
                f"{type(failure).__name__}: {failure}"
            ) from failure
        found = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        if found != [samples]:
            raise SettingsError(
                f"model.name: the network {name!r} returns {found} for {samples} samples; its "
                f"{method} must return logits of shape [batch], one per sample"
            )
        changed = [key for key, tensor in inputs.items() if tensor._version != before[key]]
        if changed:
            raise SettingsError(
                f"model.name: the network {name!r} changes its {changed[0]} in place; its {method} "
                f"must leave them as they are: write for example `x = {changed[0]} * 2` instead of "
                f"`{changed[0]}.mul_(2)`, and nothing with inplace=True on them"
            )
    module.train(was_training)
