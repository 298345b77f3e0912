"""The modules of tables: what they ask for that a gradient does not show."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from weakref import WeakSet

from torch import Tensor, nn

from stampede.optim.occurrences import watch

# Modules found so far. A search looks at every object of the process, about a tenth of a second.
_FOUND: WeakSet[nn.Module] = WeakSet()


def visit_modules(params: Sequence[Tensor], optimizer: str) -> dict[Tensor, int]:
    """Check the modules that look up in tables, and have their lookups noted.

    Found are `nn.Embedding`, `nn.EmbeddingBag` and their subclasses.

    Args:
        params: the tables.
        optimizer: its name, for messages.

    Returns:
        `padding_idx` by table, of those that have one.

    Raises:
        ValueError: a module rescales its gradients or its weights behind the optimizer's back, or
            two modules of one table differ in `padding_idx`.
    """
    by_id = {id(param): param for param in params}
    # A parameter does not know its module, and torch's optimizers are given parameters only.
    if not by_id.keys() <= {id(_weight(module)) for module in _FOUND}:
        _FOUND.update(_all_modules())
    padding: dict[Tensor, int] = {}
    for module in list(_FOUND):
        param = by_id.get(id(_weight(module)))
        if param is not None:
            shown = f"{optimizer}: a table of shape {tuple(param.shape)} belongs to"
            _check(module, shown)
            if module.padding_idx is not None:
                other = padding.setdefault(param, module.padding_idx)
                if other != module.padding_idx:
                    raise ValueError(
                        f"{shown} modules with padding_idx={other} and "
                        f"padding_idx={module.padding_idx}; give them the same"
                    )
            watch(module)
    return padding


def _all_modules() -> list[nn.Module]:
    kinds = _with_subclasses(nn.Embedding) | _with_subclasses(nn.EmbeddingBag)
    # type() instead of isinstance(), which is slower and would wake up lazy proxies.
    return [module for module in gc.get_objects() if type(module) in kinds]


def _with_subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_with_subclasses, kind.__subclasses__()))


def _weight(module: nn.Module) -> Tensor | None:
    # A module under construction has no parameters yet.
    return vars(module).get("_parameters", {}).get("weight")


def _check(module: nn.Module, shown: str) -> None:
    if module.scale_grad_by_freq:
        raise ValueError(
            f"{shown} a module with scale_grad_by_freq=True, which divides gradients by the counts "
            "that the clip multiplies by; write scale_grad_by_freq=False"
        )
    if module.max_norm is not None:
        raise ValueError(
            f"{shown} a module with max_norm={module.max_norm}, which changes weights outside the "
            "optimizer; write max_norm=None"
        )
