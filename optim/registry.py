"""Update rules and clips by the names that a configuration has for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any, TypeVar

from stampede.optim.clip import Clip, CowClip
from stampede.optim.rules import SGD, Adagrad, Adam, RowWiseAdagrad, RowWiseAdam, Rule

RULES: dict[str, type[Rule]] = {
    "adam": Adam,
    "rowwise_adam": RowWiseAdam,
    "adagrad": Adagrad,
    "rowwise_adagrad": RowWiseAdagrad,
    "sgd": SGD,
}
CLIPS: dict[str, type[Clip]] = dict.fromkeys(("none", "row", "cowclip"), CowClip)

_Kind = TypeVar("_Kind", bound=type)


def register_rule(name: str) -> Callable[[_Kind], _Kind]:
    """Class decorator that makes a `Rule` available as `optim.embedding.optimizer`.

    Its fields become keys beside that one. A subclass of `CowClipOptimizer` with this `rule_type`
    makes it an optimizer for programs.

    Args:
        name: a Python name that no other rule has.

    Raises:
        ValueError: the name is taken or not a Python name, or the class is not a frozen dataclass
            whose fields all have defaults.
    """
    return _register(name, "rule", Rule, RULES)


def register_clip(name: str) -> Callable[[_Kind], _Kind]:
    """Class decorator that makes a `Clip` available as `optim.embedding.clip.granularity`.

    Its fields but `columns` become keys beside that one. See `register_rule`.
    """
    return _register(name, "clip", Clip, CLIPS)


def _register(name: str, what: str, base: type, known: dict[str, Any]) -> Callable[[_Kind], _Kind]:
    call = f"register_{what}({name!r})"
    if not (isinstance(name, str) and name.isidentifier()):
        raise ValueError(f"{call}: write a name: @register_{what}('my_{what}')")

    def add(own: _Kind) -> _Kind:
        kind: Any = own
        is_one = isinstance(kind, type) and issubclass(kind, base) and is_dataclass(kind)
        if not (is_one and "__dataclass_params__" in vars(kind)):
            raise ValueError(
                f"{call}: found {kind!r}; write @dataclass(frozen=True) below the decorator, and a "
                f"class that inherits stampede.optim.{base.__name__}"
            )
        try:
            hash(kind())
        except TypeError as failure:
            raise ValueError(
                f"{call}: {failure}; give every setting a default that can be hashed"
            ) from None
        taken = known.get(name)
        # A file that is executed again replaces its own.
        if taken is not None and taken.__module__ != kind.__module__:
            raise ValueError(
                f"{call}: {taken.__module__} has a {what} of that name; choose another"
            )
        known[name] = kind
        return own

    return add
