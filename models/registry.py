"""Networks by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class NetworkShape:
    """What a network is built for.

    Attributes:
        fields: number of id fields.
        dim: width of an embedding.
        numbers: number of numeric inputs.
        hidden: widths of the MLP's hidden layers.
    """

    fields: int
    dim: int
    numbers: int
    hidden: tuple[int, ...]


@dataclass(frozen=True)
class Network:
    """A registered network.

    Attributes:
        build: makes the module from a `NetworkShape` and a generator of initial weights. The
            module maps (embeddings `[batch, fields, dim]`, dense `[batch, numbers]`) to logits
            `[batch]`.
        first_order: whether the model adds the first-order term to the network's logits.
    """

    build: Callable[[NetworkShape, torch.Generator], nn.Module]
    first_order: bool


_NETWORKS: dict[str, Network] = {}


def register(name: str, *, first_order: bool) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Class decorator that makes a network available under `name`."""

    def add(network: type[nn.Module]) -> type[nn.Module]:
        _NETWORKS[name] = Network(network, first_order)
        return network

    return add


def network(name: str) -> Network:
    """The network of that name.

    Raises:
        KeyError: there is none; the message lists those that exist.
    """
    if name not in _NETWORKS:
        raise KeyError(f"no network {name!r}; there are {', '.join(network_names())}")
    return _NETWORKS[name]


def network_names() -> list[str]:
    """Names of all networks, sorted."""
    return sorted(_NETWORKS)
