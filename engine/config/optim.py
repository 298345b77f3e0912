"""The section `optim`: optimizers, learning-rate schedules, scaling with the batch size."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, Union, get_origin, get_type_hints

from pydantic import Field, create_model, model_validator

from stampede.optim.clip import Clip
from stampede.optim.registry import CLIPS, RULES
from stampede.optim.rules import Adam, RowWiseAdam, Rule
from stampede.optim.scaling import ScalingRule
from stampede.optim.schedules import Schedule
from stampede.optim.update_settings import UpdateSettings
from stampede.settings import Section

# Types that add up a row's gradients in the order of the global batch on any number of ranks.
IN_ORDER_SHARDING_TYPES = ("table_wise", "row_wise")
SHARDING_TYPES = (
    "data_parallel",
    "table_wise",
    "row_wise",
    "column_wise",
    "table_row_wise",
    "table_column_wise",
    "grid_shard",
)


class PlateauSection(Section):
    """Reduction of the scheduled rate when evaluate.metric stops improving."""

    factor: float = Field(1.0, gt=0, le=1, description="factor of a reduction; 1: none")
    patience: int = Field(
        2,
        ge=0,
        description="evaluations in a row, including those within an epoch, without a better "
        "metric on evaluate.select_on before the next one reduces the rate",
    )
    threshold: float = Field(
        1e-4, ge=0, description="by how much a metric must be better than the best so far"
    )
    least: float = Field(0.01, ge=0, le=1, description="lowest fraction of the scheduled rate")


class SettingsSection(Section):
    """A section with settings of a frozen dataclass, which checks them together."""

    settings_of: ClassVar[type]

    def built(self, **more: Any) -> Any:
        """The dataclass with these settings and more; it chooses those that are null."""
        names = {setting.name for setting in fields(self.settings_of)} & {*type(self).model_fields}
        given = {name: getattr(self, name) for name in names}
        return self.settings_of(**{k: v for k, v in given.items() if v is not None}, **more)

    @model_validator(mode="after")
    def _check_settings_together(self) -> SettingsSection:
        try:
            self.built()
        except ValueError as failure:
            prefix = f"{self.settings_of.__name__}: "
            raise ValueError(str(failure).removeprefix(prefix)) from None
        return self


# The type of a key, and the arguments of its `Field`.
_Key = tuple[Any, dict[str, Any]]


def settings_section(
    kind: type,
    base: type[SettingsSection] = SettingsSection,
    keys: Mapping[str, _Key] = MappingProxyType({}),
    by_recipe: Sequence[str] = (),
) -> type[SettingsSection]:
    """The section of a dataclass's settings.

    Args:
        keys: others, before these.
        by_recipe: keys that are null unless given.
    """
    found = dict(keys)
    for name, key in _settings(kind).items():
        found.setdefault(name, key)
    for name in by_recipe:
        hint, options = found[name]
        told = f"{options['description']}; null: by the recipe"
        found[name] = hint | None, options | {"default": None, "description": told}
    section = create_model(
        f"{kind.__name__}Section",
        __base__=base,
        **{name: (hint, Field(**options)) for name, (hint, options) in found.items()},
    )
    section.settings_of = kind
    return section


def _settings(kind: type) -> dict[str, _Key]:
    """The settings of a dataclass, described by its docstring; `columns` is set by the engine."""
    told: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        arguments = inspect.cleandoc(base.__doc__ or "").partition("\nArgs:\n")[2]
        for name, text in re.findall(r"^    (\w+): (?!see )(.*(?:\n     .*)*)", arguments, re.M):
            text = text.replace("`None`", "null").replace("`", "")
            told[name] = " ".join(text.split()).removesuffix(".")
    hints, found = get_type_hints(kind), {}
    for name, default in vars(kind()).items():
        if name != "columns":
            # YAML has lists for tuples.
            strict = False if get_origin(hints[name]) is tuple else None
            told_of = {"default": default, "description": told.get(name, ""), "strict": strict}
            found[name] = hints[name], told_of
    return found


ScheduleSection: Any = settings_section(Schedule, by_recipe=("warmup", "decay"))


class TableSection(SettingsSection):
    """What all optimizers of tables have."""

    lr: float | None
    l2: float | None
    schedule: ScheduleSection = ScheduleSection()
    plateau: PlateauSection = PlateauSection()


_LR = {"default": 1e-4, "ge": 0, "description": "learning rate, which the schedule changes"}


@lru_cache
def optim_section(
    rules: tuple[tuple[str, type[Rule]], ...], clips: tuple[tuple[str, type[Clip]], ...]
) -> type[Section]:
    """The section `optim` with rules and clips by their names, the default first."""
    of_clips = []
    for kind in dict.fromkeys(kind for _, kind in clips):
        names = tuple(name for name, clip in clips if clip is kind)
        told = {"default": names[0], "description": "how the gradient of each row is clipped"}
        tag = _settings(kind).get("granularity", (Literal[names], told))
        of_clips.append(settings_section(kind, keys={"granularity": tag}))
    clip = {"default": of_clips[0](), "discriminator": "granularity"}
    clip["description"] = "null for no clipping"
    common = _settings(UpdateSettings)
    sections, told = [], "optimizer of the tables"
    for name, rule in rules:
        keys: dict[str, _Key] = {
            "optimizer": (Literal[name], {"default": name, "description": told}),
            "lr": (float, _LR),
            "l2": (float, common["l2"][1] | {"default": 1e-5, "ge": 0}),
            "weight_decay": (float, common["weight_decay"][1] | {"ge": 0}),
            "rows": common["rows"],
            "clip": (Union[(*of_clips, None)], clip),
            "on_nonfinite": common["on_nonfinite"],
        }
        by_recipe = ("lr", "l2", "betas") if rule in (Adam, RowWiseAdam) else ()
        sections.append(settings_section(rule, TableSection, keys, by_recipe))
    embedding = Annotated[Union[tuple(sections)], Field(discriminator="optimizer")]  # noqa: UP007
    of_tables = embedding, sections[0]()
    return create_model("OptimSection", __base__=_OptimSection, embedding=of_tables)


class _DenseSection(SettingsSection):
    """The optimizer of the dense layers, at the base batch size."""

    lr: float | None = Field(
        None, ge=0, description="learning rate, which the schedule changes; null: by the recipe"
    )
    schedule: ScheduleSection = ScheduleSection()
    plateau: PlateauSection = PlateauSection()
    weight_decay: float = Field(
        0.0,
        ge=0,
        description="decoupled decay (AdamW), w = w * (1 - lr*weight_decay), of matrices only: not "
        "of biases, norms and first-order weights; never scaled",
    )


DenseSection: Any = settings_section(Adam, _DenseSection, by_recipe=("betas",))


class ScalingSection(Section):
    """How the settings for the base batch size change with the batch size."""

    rule: ScalingRule | None = Field(
        None, description="scaling rule; none: no scaling; null: by the recipe"
    )
    base_batch_size: int | None = Field(
        None,
        ge=1,
        description="global batch size that the settings are meant for; null: by the recipe",
    )


class _OptimSection(Section):
    """Optimizers."""

    embedding: TableSection
    dense: DenseSection = DenseSection()
    scaling: ScalingSection = ScalingSection()


OptimSection: Any = optim_section(tuple(RULES.items()), tuple(CLIPS.items()))
