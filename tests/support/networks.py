"""Every network, and options that change what it is made of."""

import json

from stampede.models import network, network_names

GOALS = ["click", "conversion"]
# Those of examples and of other tests are not ours; those that need a history have tests of theirs.
OURS = [
    name
    for name in network_names()
    if network(name).module.__module__.startswith("stampede.") and not network(name).histories
]
VARIANTS = [
    *((name, {}) for name in OURS),
    ("dcnv2", {"cross": "full"}),
    ("dcnv2", {"experts": 1}),
    ("autoint", {"deep": True}),
    (
        "destine",
        {"unary": "field", "residual_mode": "each_layer", "use_scale": True, "relu": False}
        | {"deep": True},
    ),
    ("destine", {"residual_mode": "none", "layers": 1}),
    ("finalmlp", {"heads": 2, "second": [6], "gates": None}),
    ("finalmlp", {"gates": []}),
    ("masknet", {"structure": "serial", "reduction": 0.5}),
    ("mmoe", {"experts": 3, "gate": [5], "tower": [4, 3]}),
    ("ple", {"layers": 1, "goal_experts": 2, "shared_experts": 2, "gate": [5]}),
    ("wukong", {"bottom": None, "rank": None, "layers": 1}),
]


def goals_of(name: str) -> list[str]:
    """The goals of data that a network can be trained on; none for a single label."""
    return GOALS if network(name).goals else []


def variant_id(value: object) -> str:
    """What pytest calls it."""
    return value if isinstance(value, str) else json.dumps(value)
