"""A whole CTR model: embedding front, network, first-order term, global bias."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from stampede.models.embedding_front import EmbeddingFront, StoredColumns
from stampede.models.fm_terms import scaled
from stampede.models.mlp import is_one_column, is_plain, linear
from stampede.models.registry import NetworkShape, Normalization, network
from stampede.native_library import switched_off
from stampede.settings import Section, SettingsError


class CTRModel(nn.Module):
    """Logit of a click: `bias + first-order term + network(embeddings, numbers)`.

    The first-order term is `scale * (sum_f w_f[id] + <w, x>)`: a weight per id, stored beside its
    embedding, and `number_weights` for the numbers where there are any. With Adam, whose steps do
    not depend on the size of a gradient, the true weights `scale * w` then learn `scale` times as
    fast as embeddings, and an `l2` of the stored weights is `l2 / scale**2` of the true ones.

    Attributes:
        front: the tables.
        network: the network.
        numbers: number of numeric inputs.
        first_order: whether there is a first-order term.
        first_order_scale: the `scale` of the first-order term.

    Args:
        name: registered name of the network.
        vocabulary_sizes: rows of each field's table, by field name.
        numbers: number of numeric inputs.
        dim: width of the embeddings.
        hidden: widths of the MLP's hidden layers.
        seed: seed of the dense layers' initial weights.
        options: of the network; by default its defaults.
        first_order_scale: of the first-order term, above 0. The model's initial scores do not
            depend on it: the numbers' stored weights begin with `1 / scale` of what they draw.
        dropout, normalization: see `NetworkShape`.

    Raises:
        KeyError: there is no network of that name.
        SettingsError: the options do not go with the data; or the network does not do what
            `register` asks for, or has no use for a setting that is not at its default.
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
        first_order_scale: float = 1.0,
        dropout: float = 0.0,
        normalization: Normalization = "none",
    ) -> None:
        super().__init__()
        registered = network(name)
        generator = torch.Generator().manual_seed(seed)
        self.front = EmbeddingFront(vocabulary_sizes, dim)
        self.numbers = numbers
        shape = NetworkShape(
            len(vocabulary_sizes), dim, numbers, tuple(hidden), dropout, normalization
        )
        self.bias = nn.Parameter(torch.zeros(1))
        self.number_weights: nn.Linear | None = None
        self.first_order = registered.first_order
        self.first_order_scale = first_order_scale
        # The same on every rank, also where a network takes torch's own initial weights.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            self.network = registered.build(shape, generator, options or registered.options())
            _check_logits(name, self.network, shape)
            self._check_first_order(name, shape)
            if registered.first_order and numbers:
                self.number_weights = linear(numbers, 1, generator, bias=False)
                with torch.no_grad():
                    self.number_weights.weight /= first_order_scale

    def _check_first_order(self, name: str, shape: NetworkShape) -> None:
        """Refuse a scale that nothing is multiplied by, and a method that fails."""
        scale = self.first_order_scale
        said = f"model.first_order_scale: found {scale:g}, but "
        if scale != 1.0 and not self.first_order:
            raise SettingsError(
                f"{said}the network {name!r} has no first-order term; leave the key out, or choose "
                "a network that has one, such as deepfm"
            )
        if not (self.first_order and _has_own_first_order(self.network)):
            return
        if scale != 1.0 and not _takes(self.network.with_first_order, 5):
            raise SettingsError(
                f"{said}with_first_order of the network {name!r} takes no scale; give it a fifth "
                "argument, which it multiplies the first-order term by, or leave the key out"
            )
        _check_logits(name, self.network, shape, first_order=self._first_order_arguments())

    def _first_order_arguments(self) -> tuple[float, ...]:
        """Further arguments of `with_first_order`, which may take no scale where it is 1."""
        return () if self.first_order_scale == 1.0 else (self.first_order_scale,)

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
            more = self._first_order_arguments()
            return self.network.with_first_order(stored, dim, dense, weights, *more) + self.bias
        embeddings, id_weights = self.front.split(rows)
        logits = self.network(embeddings, dense) + self.bias
        if self.first_order:
            logits = logits + scaled(id_weights.sum(1), self.first_order_scale)
        if self.number_weights is not None:
            of_numbers = self.number_weights(dense).squeeze(1)
            logits = logits + scaled(of_numbers, self.first_order_scale)
        return logits

    def _network_adds_first_order(self) -> bool:
        """Whether it can, and no hook waits for a module to be called instead."""
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


def _takes(method: Callable[..., Tensor], arguments: int) -> bool:
    """Whether a method can be called with so many positional arguments."""
    try:
        inspect.signature(method).bind(*[None] * arguments)
    except TypeError:
        return False
    return True


class _WithFirstOrder(nn.Module):
    """Calls a network's `with_first_order`."""

    def __init__(self, network: nn.Module, dim: int, more: tuple[float, ...]) -> None:
        super().__init__()
        self.network, self._dim, self._more = network, dim, more

    def forward(self, rows: Tensor, numbers: Tensor) -> Tensor:
        count = numbers.shape[1]
        weights = numbers.new_zeros(1, count) if count else None
        return self.network.with_first_order(rows, self._dim, numbers, weights, *self._more)


def _check_logits(
    name: str,
    network: nn.Module,
    shape: NetworkShape,
    *,
    first_order: tuple[float, ...] | None = None,
) -> None:
    """Refuse a network that cannot be called, changes its inputs, or whose logits would broadcast.

    It is tried as it is evaluated and as it is trained; its weights and buffers are left alone.

    Args:
        first_order: its method `with_first_order` is called instead of `forward`, with these
            arguments besides; None: `forward`.
    """
    samples, rows = 2, "embeddings"
    module, width, method = network, shape.dim, "forward"
    if first_order is not None:
        module, method = _WithFirstOrder(network, shape.dim, first_order), "with_first_order"
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
