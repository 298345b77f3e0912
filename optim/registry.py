# pyright: basic
"""Update rules and clips by the names that a configuration has for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from keyword import iskeyword
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

# Arguments of every optimizer, and what checkpoints keep beside the states.
_RESERVED = {
    *("params", "lr", "optimizer", "clip", "l2", "weight_decay", "rows", "on_nonfinite"),
    *("padding_idx", "seed", "schedule", "weight", "step"),
}


def register_rule(name: str) -> Callable[[_Kind], _Kind]:
    """Class decorator that makes a `Rule` available as `optim.embedding.optimizer`.

    Its fields become keys beside that one. A subclass of `CowClipOptimizer` with this `rule_type`
    makes it an optimizer for programs.

    Args:
        name: a Python name that no other rule has.

    Raises:
        ValueError: the name is taken or not a Python name, or the class is not a frozen dataclass
            whose fields all have defaults; it lacks `step_`, or uses a name of ours.
    """
    return _register(name, "rule", Rule, RULES, "step_")


def register_clip(name: str) -> Callable[[_Kind], _Kind]:
    """Class decorator that makes a `Clip` available as `optim.embedding.clip.granularity`.

    Its fields but `columns` become keys beside that one. See `register_rule`.
    """
    return _register(name, "clip", Clip, CLIPS, "largest_norm")


def _register(
    name: str, what: str, base: type, known: dict[str, Any], method: str
) -> Callable[[_Kind], _Kind]:
    call = f"register_{what}({name!r})"
    if not (isinstance(name, str) and name.isidentifier()) or iskeyword(name):
        raise ValueError(f"{call}: write a name: @register_{what}('my_{what}')")

    def add(own: _Kind) -> _Kind:
        kind: Any = own
        is_one = isinstance(kind, type) and issubclass(kind, base) and is_dataclass(kind)
        if not (is_one and "__dataclass_params__" in vars(kind)):
            raise ValueError(
                f"{call}: found {kind!r}; write @dataclass(frozen=True) below the decorator, and a "
                f"class that inherits stampede.optim.{base.__name__}"
            )
        if getattr(kind, method) is getattr(base, method):
            raise ValueError(f"{call}: {kind.__name__} has no method {method}; write one")
        states = [*getattr(kind, "element_states", ()), *getattr(kind, "row_states", ())]
        names = [*(one.name for one in fields(kind)), *states]
        wrong = sorted(_RESERVED.intersection(names)) or [n for n in states if states.count(n) > 1]
        if wrong:
            raise ValueError(
                f"{call}: {wrong[0]!r} is the name of another setting or state; choose another"
            )
        try:
            hash(kind())
        except TypeError as failure:
            raise ValueError(
                f"{call}: {failure}; give every setting a default that can be hashed"
            ) from None
        taken = known.get(name)
        # A file that is executed again replaces its own.
        if taken is not None and _where(taken) != _where(kind):
            raise ValueError(
                f"{call}: {'.'.join(_where(taken))} is a {what} of that name; choose another"
            )
        known[name] = kind
        return own

    return add


def _where(kind: type) -> tuple[str, str]:
    return kind.__module__, kind.__qualname__
