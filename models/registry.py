# pyright: basic
"""Networks by name."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from stampede.models.options import (
    AutoIntOptions,
    BSTOptions,
    CrossOptions,
    DCNv2Options,
    DESTINEOptions,
    DINOptions,
    DLRMOptions,
    FinalMLPOptions,
    MaskNetOptions,
    MMoEOptions,
    NoOptions,
    PLEOptions,
    SharedBottomOptions,
    WukongOptions,
    XDeepFMOptions,
)
from stampede.settings import Section, SettingsError

if TYPE_CHECKING:
    # torch takes seconds to import, and reading a configuration does not need it.
    import torch
    from torch import nn

Normalization = Literal["none", "layer", "batch"]
GoalWeighting = Literal["fixed", "uncertainty"]


@dataclass(frozen=True)
class NetworkShape:
    """What a network is built for.

    Attributes:
        fields: number of id fields.
        dim: width of an embedding.
        numbers: number of numeric inputs.
        hidden: widths of the MLP's hidden layers.
        dropout: share of each hidden layer's outputs that training leaves out, in [0, 1).
        normalization: `layer` or `batch` for such a norm before the ReLU of each hidden layer.
        goals: number of goals, each with a logit; 1 of a single label.
        histories: of each field of `pooling: none`, the number of its query among the id fields.
    """

    fields: int
    dim: int
    numbers: int
    hidden: tuple[int, ...]
    dropout: float = 0.0
    normalization: Normalization = "none"
    goals: int = 1
    histories: tuple[int, ...] = ()

    @property
    def inputs(self) -> int:
        """Width of all embeddings and numbers, concatenated."""
        return self.fields * self.dim + self.numbers


# Settings that a network without an MLP cannot use, with their defaults.
_OF_LAYERS = {"dropout": 0.0, "normalization": "none"}


class _WatchedShape(NetworkShape):
    """Records which of `_OF_LAYERS` the network reads."""

    def __getattribute__(self, name: str) -> Any:
        if name in _OF_LAYERS:
            self.read.add(name)
        return super().__getattribute__(name)

    @functools.cached_property
    def read(self) -> set[str]:
        """Names read so far."""
        return set()


@dataclass(frozen=True)
class Network:
    """A registered network; see `register`.

    Attributes:
        name: its registered name.
        source: its class, or `file.Class` in this package, imported when needed.
        first_order: whether the model adds the first-order term to the network's logits.
        options: the section `model.options` of the configuration.
        goals: whether it has a logit for each of several goals, instead of one logit.
        histories: whether its `forward` takes histories.
    """

    name: str
    source: type[nn.Module] | str
    first_order: bool = False
    options: type[Section] = NoOptions
    goals: bool = False
    histories: bool = False

    def check_goals(self, goals: Collection[str]) -> None:
        """Refuse data with several goals for a network of one, and the other way round."""
        if self.goals == bool(goals):
            return
        fitting = ", ".join(n for n, other in sorted(_NETWORKS.items()) if other.goals)
        if goals:
            raise SettingsError(
                f"model.name: found {self.name!r}, which has one logit, but the data have the "
                f"goals {', '.join(goals)}; write one of {fitting}, or a schema with one label"
            )
        raise SettingsError(
            f"model.name: found {self.name!r}, which is for several goals, but the data have one "
            "label; write several in the schema, such as `label: {click: clicked, buy: bought}`, "
            "or another network, such as deepfm"
        )

    @property
    def module(self) -> type[nn.Module]:
        """The network's class."""
        if not isinstance(self.source, str):
            return self.source
        file, name = self.source.split(".")
        return getattr(importlib.import_module(f"stampede.models.{file}"), name)

    def build(self, shape: NetworkShape, generator: torch.Generator, options: Section) -> nn.Module:
        """Build the module.

        Args:
            generator: source of the initial weights.
            options: an instance of `self.options`.

        Raises:
            SettingsError: the options do not fit the shape; the class cannot be called; or it
                ignores a setting that differs from its default.
        """
        watched = _WatchedShape(**vars(shape))
        arguments: list[Any] = [watched, generator]
        if self.options is not NoOptions:
            arguments.append(options)
        try:
            module = self.module(*arguments)
        except SettingsError:
            raise
        except Exception as failure:
            names = "shape, generator, options"[: None if len(arguments) == 3 else -9]
            raise SettingsError(
                f"model.name: the network {self.name!r} cannot be built with ({names}): "
                f"{type(failure).__name__}: {failure}; correct its class or model.options"
            ) from failure
        for key, default in _OF_LAYERS.items():
            if vars(shape)[key] != default and key not in watched.read:
                raise SettingsError(
                    f"model.{key}: found {vars(shape)[key]}, but the network {self.name!r} ignores "
                    f"it (it never reads shape.{key}); leave the key out, or choose a network with "
                    "an MLP, such as deepfm"
                )
        return module


_NETWORKS: dict[str, Network] = {
    network.name: network
    for network in (
        Network("autoint", "autoint.AutoInt", options=AutoIntOptions),
        Network("bst", "bst.BST", options=BSTOptions, histories=True),
        Network("dcn", "dcn.DCN", first_order=True, options=CrossOptions),
        Network("dcnv2", "dcn.DCNv2", first_order=True, options=DCNv2Options),
        Network("deepfm", "deepfm.DeepFM", first_order=True),
        Network("destine", "destine.DESTINE", first_order=True, options=DESTINEOptions),
        Network("din", "din.DIN", options=DINOptions),
        Network("dlrm", "dlrm.DLRM", options=DLRMOptions),
        Network("esmm", "goals.ESMM", goals=True),
        Network("finalmlp", "finalmlp.FinalMLP", options=FinalMLPOptions),
        Network("fm", "deepfm.FM", first_order=True),
        Network("lr", "wide_deep.LogisticRegression", first_order=True),
        Network("masknet", "masknet.MaskNet", options=MaskNetOptions),
        Network("mmoe", "goals.MMoE", options=MMoEOptions, goals=True),
        Network("ple", "goals.PLE", options=PLEOptions, goals=True),
        Network("shared_bottom", "goals.SharedBottom", options=SharedBottomOptions, goals=True),
        Network("wide_deep", "wide_deep.WideDeep", first_order=True),
        Network("wukong", "wukong.Wukong", options=WukongOptions),
        Network("xdeepfm", "xdeepfm.XDeepFM", first_order=True, options=XDeepFMOptions),
    )
}


def register(
    name: str,
    *,
    first_order: bool = False,
    options: type[Section] = NoOptions,
    goals: bool = False,
    histories: bool = False,
) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Class decorator that makes a network available as `model.name`.

    The class is called with a `NetworkShape`, a `torch.Generator` for initial weights, and its
    options if it has any. The module maps embeddings `[batch, fields, dim]` and numbers
    `[batch, numbers]` to logits `[batch]`, or with `goals` `[batch, shape.goals]`. A global batch
    is divided among processes, and on a CPU into tiles, so a sample's logit must not depend on
    other samples, except by `nn.BatchNorm1d`, see `use_global_batches`.
    The module must not change its inputs in place.

    Other methods are optional. `l2_terms()` returns pairs of a parameter and a coefficient c, for
    `c * ||w||^2` in the loss. With `first_order`, `with_first_order(stored, dim, numbers,
    number_weights, scale)` returns `forward` plus the first-order term, `[batch]`, if it can
    compute both in fewer passes, from rows `[batch, fields, stored width]` (see `StoredColumns`)
    and weights `[1, numbers]` or None. The model then calls it instead of `forward`, unless the
    network or the layer of `number_weights` was hooked, replaced or compiled, or a subclass
    overrides `forward`. With `goals`, `combined(logits)` maps the logits with their biases to those
    of the goals, and `separated(shares)` the goals' shares of clicks to the means that the biases
    begin at, see `ESMM`.

    Args:
        name: a Python name that no other network has.
        first_order: whether the model adds the first-order term, a weight per id and number.
        options: the keys of `model.options`, as a `Section` with defaults and descriptions.
        goals: whether the network is for several goals; the model then adds no first-order term.
        histories: whether `forward` takes a third argument, the fields of `pooling: none`: a list
            of `stampede.models.histories.History`, in the order of `shape.histories`.

    Raises:
        SettingsError: the name is taken or not a Python name.
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise SettingsError(f"register: found {name!r}; write a name: @register('my_network')")

    if first_order and goals:
        raise SettingsError(f"register({name!r}): found first_order and goals; write one of them")

    def add(network: type[nn.Module]) -> type[nn.Module]:
        taken = _NETWORKS.get(name)
        # A file that is executed again replaces its own networks.
        if taken is not None and taken.module.__module__ != network.__module__:
            raise SettingsError(
                f"register({name!r}): {taken.module.__module__} has a network of that name; "
                "choose another"
            )
        _NETWORKS[name] = Network(name, network, first_order, options, goals, histories)
        return network

    return add


def network(name: str) -> Network:
    """The network of that name.

    Raises:
        KeyError: there is none; the message lists all names.
    """
    if name not in _NETWORKS:
        raise KeyError(f"no network {name!r}; write one of {', '.join(network_names())}")
    return _NETWORKS[name]


def network_names() -> list[str]:
    """All names, sorted."""
    return sorted(_NETWORKS)
