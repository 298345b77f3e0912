"""The param groups of Helen in plain PyTorch."""

from __future__ import annotations

from typing import Any

from stampede.optim.helen.perturbation import HelenSettings, check_at_least_0


def settings_of(group: dict[str, Any]) -> HelenSettings:
    """The checked settings of a param group."""
    names = HelenSettings.__dataclass_fields__
    return HelenSettings(**{name: group[name] for name in names} | {"betas": tuple(group["betas"])})


def check_group(group: dict[str, Any]) -> None:
    """Raise ValueError if a setting is missing or out of range."""
    settings_of(group)
    check_at_least_0("lr", group["lr"])
    choices = {
        "kind": ("embedding", "dense"),
        "net_pert": (False, True),
        "dense_norm": ("all", "last_table"),
    }
    for name, (one, other) in choices.items():
        if group.get(name) not in (one, other):
            raise ValueError(
                f"Helen: {name} of a param group is {group.get(name)!r}; write {one!r} or {other!r}"
            )
