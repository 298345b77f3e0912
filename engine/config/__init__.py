"""The configuration of a job: a model per section; descriptions become the help."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import yaml
from pydantic import Field, create_model, model_validator

from stampede import stores
from stampede.engine.config.data import (
    DataSection,
    PreparedSection,
    RawSection,
    SyntheticSection,
)
from stampede.engine.config.evaluate import EvaluateSection
from stampede.engine.config.model import ModelSection, registered_networks, section_of
from stampede.engine.config.optim import (
    IN_ORDER_SHARDING_TYPES,
    SHARDING_TYPES,
    OptimSection,
    optim_section,
)
from stampede.engine.config.presets import Preset
from stampede.models import GoalWeighting, Network, network
from stampede.optim.registry import CLIPS, RULES
from stampede.settings import Section, Seed, SettingsError

if TYPE_CHECKING:
    from stampede.data.sources import Source


class RunSection(Section):
    """The run as a whole."""

    name: str = Field("", description="name of the run folder; default: the file's name")
    dir: str = Field("runs", description="folder that holds the run folders")
    seed: Seed = Field(0, description="seed of initial weights and the order of rows")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto: a GPU if there is one"
    )
    kernels: Literal["auto", "torch", "triton"] = Field(
        "auto",
        description="what updates tables on a GPU. auto: the Triton kernels, if a check before the "
        "first step finds that they compute there what plain PyTorch does; torch (slower), triton: "
        "without a check",
    )
    quiet: bool = Field(
        False, description="print only warnings and errors; results are in the run folder"
    )
    overwrite: bool = Field(False, description="delete the run folder of that name first")
    hang_seconds: float = Field(
        600,
        ge=0,
        description="seconds without progress on any rank, or a sign of life from one that the "
        "others wait for, after which the run ends with status 3 and names the rank; without "
        "progress the first step gets ten minutes more; 0: never",
    )
    slow_hang_seconds: float = Field(
        24 * 3600,
        gt=0,
        description="the limit without progress during preparation, saves, metrics and other "
        "stages whose time grows with the data; used if it is longer than hang_seconds",
    )


class ProfileSection(Section):
    """A trace of some steps by torch.profiler."""

    start: int = Field(10, ge=1, description="first step to trace, counted from 1")
    steps: int = Field(
        0,
        ge=0,
        le=1000,
        description="steps to trace into profile/ of the run folder, a file per rank, some MB per "
        "step; 0: none",
    )


class TrainSection(Section):
    """The training loop."""

    batch_size: int | None = Field(
        None, ge=1, description="global batch size, over all ranks; null: by the recipe"
    )
    epochs: int | None = Field(
        None, ge=1, description="passes over the training rows; null: by the recipe"
    )
    averaging: int | None = Field(
        None,
        ge=0,
        description="steps of an epoch, evenly spaced, whose mean weights are put in their place "
        "at its end, for rates that do not fall; a copy of all weights; 0: none; null: by the "
        "recipe",
    )
    refit: bool = Field(
        False,
        description="train again on the training and the validation rows, with as many epochs as "
        "validation chose, and evaluate the test part once; the run that chose is in the folder "
        "NAME-selection",
    )
    replay: int | None = Field(
        None,
        ge=0,
        description="stampede incremental: number of earlier files that each period trains on "
        "again, with a new model; 0: none, the model of the period before goes on with the new "
        "file; null: all of them while the log has fewer than a million rows, then 0",
    )
    negative_rate: float = Field(
        1.0,
        gt=0,
        le=1,
        description="share of the rows without a click that the log kept, such as 0.1; scores of "
        "predict, packages and ONNX files are corrected for it, metrics of the run are not. With "
        "several goals, of the rows without the first one, which the others need",
    )
    goals: dict[str, Annotated[float, Field(ge=0)]] = Field(
        {},
        description="weights of the goals' mean losses in the loss, by goal; 1 for goals that are "
        "not named",
    )
    goal_weighting: GoalWeighting = Field(
        "fixed",
        description="fixed: by the weights above; uncertainty: also by a factor for each goal "
        "that training learns (Kendall et al., CVPR 2018)",
    )
    precision: Literal["auto", "fp32", "tf32", "bf16"] = Field(
        "fp32",
        description="precision of the dense layers; tf32 is for GPUs, bf16 is used only if it is "
        "faster; auto is the fastest that the device has",
    )
    compile: Literal["none", "default", "cuda_graphs"] = Field(
        "none",
        description="torch.compile of the network; cuda_graphs, on a GPU, also launches it as one "
        "graph; on a CPU a compiled network does not use the C++ kernels",
    )
    reproducible: bool = Field(
        False,
        description="the same bits on any number of ranks that divides train.tiles; see the "
        "manual for the requirements",
    )
    tiles: int = Field(
        8,
        ge=1,
        le=1024,
        description="with train.reproducible, parts of a global batch that the dense layers "
        "compute one by one; a power of two",
    )
    log_every: int = Field(20, ge=1, description="steps between two lines of metrics.jsonl")
    on_nonfinite: Literal["error", "skip_batch"] = Field(
        "error",
        description="what to do with a batch whose loss is not finite. error: stop; skip_batch: "
        "leave it out, but stop after ten in a row (on a GPU every step then waits for the loss)",
    )
    timing_every: int = Field(
        500,
        ge=0,
        description="steps between reports of step times, by phase and over all ranks, with the "
        "slowest rank; 0: none",
    )
    profile: ProfileSection = ProfileSection()


class CheckpointSection(Section):
    """Checkpoints: after every evaluated epoch, and when a signal stops the run."""

    resume: Literal["never", "auto"] = Field(
        "never", description="auto: continue from the newest checkpoint in the run folder"
    )
    init_from: str = Field(
        "",
        description="checkpoint, or run folder (its best epoch), whose weights a new run starts "
        "from, with table rows matched by id; relative to the working folder",
    )
    init_state: Literal["weights", "all"] = Field(
        "weights",
        description="what to take from init_from. weights: for a new run; all: also the "
        "optimizers' state, matched by id, and the number of steps, to continue with a new "
        "log",
    )
    every_steps: int = Field(
        0, ge=0, description="steps between checkpoints within an epoch; 0: none"
    )
    every_minutes: float = Field(
        0, ge=0, description="minutes between checkpoints within an epoch; 0: none"
    )
    keep: int = Field(2, ge=1, description="newest checkpoints to keep, besides the best epoch's")
    keep_every: int = Field(
        0, ge=0, description="also keep the checkpoint of every N-th epoch; 0: none"
    )
    asynchronous: bool = Field(
        True,
        description="write a copy of the state during training; where memory lacks for a copy, "
        "training waits instead",
    )


class CommunicationSection(Section):
    """Precision of the rows that ranks send each other."""

    forward: Literal["fp32", "fp16", "bf16"] = Field(
        "fp32", description="precision of pooled embeddings when they are sent"
    )
    backward: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="precision of the gradients of pooled embeddings when they are sent; they are "
        "too small for fp16",
    )


class ShardingSection(Section):
    """Where the tables are, and what ranks send each other."""

    plan: Literal[("auto", *SHARDING_TYPES)] = Field(
        "auto", description="sharding type of all tables; auto: TorchRec's planner chooses"
    )
    communication: CommunicationSection = CommunicationSection()


class RecipeSection(Section):
    """Factors of what the recipe chooses; they suit a log at any batch size and number of rows."""

    table_lr: float = Field(1.0, gt=0, description="of optim.embedding.lr, if that is null")
    dense_lr: float = Field(1.0, gt=0, description="of optim.dense.lr, if that is null")
    l2: float = Field(1.0, ge=0, description="of optim.embedding.l2, if that is null")
    epochs: float = Field(
        1.0, gt=0, description="of train.epochs, if that is null; the result is rounded"
    )


class Config(Section):
    """A whole job."""

    preset: Preset = Field(
        "auto",
        description="how unset keys get their values. auto: the recipe chooses values for null "
        "keys by the size of the training part, and prints them; paper: as in the CowClip "
        "paper (arXiv 2204.06240)",
    )
    recipe: RecipeSection = RecipeSection()
    run: RunSection = RunSection()
    data: DataSection = SyntheticSection()
    model: ModelSection = ModelSection()
    optim: OptimSection = OptimSection()
    train: TrainSection = TrainSection()
    evaluate: EvaluateSection = EvaluateSection()
    checkpoint: CheckpointSection = CheckpointSection()
    sharding: ShardingSection = ShardingSection()

    @model_validator(mode="after")
    def _check_recipe(self) -> Config:
        if self.preset == "paper" and self.recipe != RecipeSection():
            raise ValueError(
                "recipe has factors of what the recipe chooses, but preset is paper, which leaves "
                "it nothing to choose; write preset: auto, or the values themselves"
            )
        return self

    @model_validator(mode="after")
    def _check_reproducible(self) -> Config:
        tiles, plan = self.train.tiles, self.sharding.plan
        if tiles & (tiles - 1):
            raise ValueError(f"train.tiles: {tiles} is not a power of two; write 8 or 16")
        if not self.train.reproducible:
            return self
        sent = self.sharding.communication
        # By key: its value, and those that keep the bits.
        keys = {
            "sharding.plan": (plan, ("auto", *IN_ORDER_SHARDING_TYPES)),
            "sharding.communication.forward": (sent.forward, ("fp32",)),
            "sharding.communication.backward": (sent.backward, ("fp32",)),
            "train.compile": (self.train.compile, ("none",)),
        }
        for key, (value, fit) in keys.items():
            if value not in fit:
                raise ValueError(
                    f"{key}: with {value!r} the bits of a run depend on the number of ranks, which "
                    f"train.reproducible forbids; write {' or '.join(fit)}"
                )
        return self

    @model_validator(mode="after")
    def _check_sections_together(self) -> Config:
        # For a prepared folder this is known only once it is open.
        no_validation = getattr(self.data, "validation_fraction", None) == 0
        if isinstance(self.data, RawSection):
            named = self.data.validation_values or self.data.validation_path
            no_validation = no_validation and not named
        if self.evaluate.select_on == "validation" and no_validation:
            raise ValueError(
                "evaluate.select_on is 'validation' but data.validation_fraction is 0; write a "
                "fraction above 0, or evaluate.select_on: test"
            )
        if self.evaluate.calibrate is True and self.model.name == "esmm":
            raise ValueError(
                "evaluate.calibrate shifts each score, but the second score of esmm is a "
                "product of two; write evaluate.calibrate: false"
            )
        if self.run.overwrite and self.checkpoint.resume == "auto":
            raise ValueError(
                "run.overwrite=true would delete the checkpoints that checkpoint.resume=auto "
                "continues from; write only one of them"
            )
        if self.train.compile == "cuda_graphs" and self.run.device == "cpu":
            raise ValueError(
                "train.compile: found 'cuda_graphs', which does not work on run.device 'cpu'; "
                "write train.compile: default or none"
            )
        for part in ("embedding", "dense"):
            key, schedule = f"optim.{part}.schedule", getattr(self.optim, part).schedule
            if schedule.decay in (None, "constant"):
                continue
            if getattr(self.data, "split", "") == "periods":
                raise ValueError(
                    f"{key}.decay is {schedule.decay!r}, but data.split is 'periods' and another "
                    "period may follow; write constant, or leave it out"
                )
            epochs, warmup = self.train.epochs, schedule.warmup or 0.0
            if epochs is not None and schedule.unit == "epochs" and warmup >= epochs:
                raise ValueError(
                    f"{key}.decay is {schedule.decay!r}, but the warm-up of {warmup:g} epochs "
                    f"lasts as long as the training, train.epochs {epochs}; write a {key}.warmup "
                    f"below {epochs}, more epochs, or {key}.decay: constant"
                )
        return self

    @model_validator(mode="after")
    def _check_uses_of_the_validation_part(self) -> Config:
        refits, adds_up = self.train.refit, self.evaluate.calibrate is True
        is_chosen_on_test = self.evaluate.select_on == "test"
        if is_chosen_on_test or getattr(self.data, "split", "") == "periods":
            for key, uses in {"train.refit": refits, "evaluate.calibrate": adds_up}.items():
                if uses:
                    raise ValueError(
                        f"{key} needs the validation part, which this run does not have; write "
                        f"{key}: false, or another select_on or split"
                    )
        if not refits:
            return self
        if self.data.kind == "prepared":
            raise ValueError(
                "train.refit prepares the log again without a validation part, but data.kind is "
                "'prepared'; write the kind and the path of the raw log, or train.refit: false"
            )
        if getattr(self.data, "train_rows", None) is not None:
            raise ValueError(
                "train.refit trains on all rows before the test part, data.train_rows on the last "
                "ones; write only one of them"
            )
        for part in ("embedding", "dense"):
            if getattr(self.optim, part).plateau.factor < 1:
                raise ValueError(
                    f"optim.{part}.plateau goes by the validation part, which train.refit trains "
                    "on; write only one of them"
                )
        return self


def config_type() -> type[Config]:
    """`Config` with every network, rule and clip that is registered now."""
    return _config_type(registered_networks(), tuple(RULES.items()), tuple(CLIPS.items()))


# Making a class takes milliseconds, and configurations can be compared only within one class.
@functools.lru_cache
def _config_type(networks: tuple[Network, ...], rules: Any, clips: Any) -> type[Config]:
    sections = {"model": (section_of(networks), ...), "optim": (optim_section(rules, clips), ...)}
    return create_model("Config", __base__=Config, __doc__=Config.__doc__, **sections)


def to_yaml(config: Config) -> str:
    """The whole configuration with defaults, as YAML for `load_config`."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def check_log(config: Config) -> None:
    """Check that the files of a log are there, and what is said of its columns.

    Files in a store are not asked for twice.

    Raises:
        DataError, SettingsError: what is wrong.
    """
    section = config.data
    if isinstance(section, RawSection | PreparedSection):
        section.check_path()
    if isinstance(section, RawSection) and not any(map(stores.is_url, section.paths())):
        check_columns(config, section.source())


def check_columns(config: Config, source: Source) -> None:
    """Check what is said of the columns of a log."""
    schema = source.log.schema
    multi = {name: field.separator is not None for name, field in schema.ids.items()}
    check_groups(config.evaluate.group_by, multi)
    check_goals(config, schema.goals)


def check_groups(group_by: str, multi: Mapping[str, bool]) -> None:
    """`multi` says of each id field whether a sample may have several ids."""
    single = [name for name, has_several in multi.items() if not has_several]
    if group_by and group_by not in single:
        found = "a field of several ids" if group_by in multi else "not an id field"
        raise SettingsError(
            f"evaluate.group_by: {group_by!r} is {found}; write one of {', '.join(single)}"
        )


def check_goals(config: Config, goals: Collection[str]) -> None:
    """Check settings of goals against those of the data; none for a single label.

    Raises:
        SettingsError: the network or a setting does not fit them.
    """
    network(config.model.name).check_goals(goals)
    for key, weights in (
        ("train.goals", config.train.goals),
        ("evaluate.select_goals", config.evaluate.select_goals),
    ):
        unknown = next((name for name in weights if name not in goals), None)
        if unknown is not None:
            which = f"goals are {', '.join(goals)}" if goals else "data have one label"
            raise SettingsError(f"{key}: found {unknown!r}, but the {which}; write it as there")
        if weights and not any(weights.get(goal, key == "train.goals") for goal in goals):
            raise SettingsError(f"{key}: all weights are 0; write one above 0")
    if config.train.goal_weighting != "fixed" and not goals:
        raise SettingsError(
            f"train.goal_weighting: found {config.train.goal_weighting!r}, but the data have one "
            "label; leave it out"
        )
    for key in ("compare_with_lr", "compare_with_trees"):
        if goals and getattr(config.evaluate, key) is True:
            raise SettingsError(
                f"evaluate.{key}: found true, but that model is fitted to a single label, and the "
                f"data have the goals {', '.join(goals)}; leave it out"
            )


def goal_weights(config: Config, goals: Sequence[str]) -> dict[str, float]:
    """Weights of several goals in what chooses the best epoch; none for a single label."""
    chosen, default = config.evaluate.select_goals, 0.0
    if not chosen:
        chosen, default = config.train.goals, 1.0
    return {goal: chosen.get(goal, default) for goal in goals}


def is_calibrated(config: Config) -> bool:
    """Whether the scores of the validation part calibrate the model."""
    settings, is_product = config.evaluate, config.model.name == "esmm"
    return bool(settings.calibrate) and settings.select_on == "validation" and not is_product


def check_divides(config: Config, world_size: int, where: str = "") -> None:
    """Check that the ranks can divide the global batches, with a `SettingsError`."""
    for key, size in (
        ("train.batch_size", config.train.batch_size),
        ("evaluate.batch_size", config.evaluate.batch_size),
    ):
        if size is not None and size % world_size:
            raise SettingsError(
                f"{where}{key}: {size} is global and must be a multiple of the number of ranks, "
                f"{world_size}; write {max(1, size // world_size) * world_size} or "
                f"{(size // world_size + 1) * world_size}"
            )
    if config.train.reproducible and config.train.tiles % world_size:
        raise SettingsError(
            f"{where}train.tiles: {config.train.tiles} is not divisible by the number of ranks, "
            f"{world_size}; with train.reproducible the ranks share the tiles of a batch: start "
            "1, 2, 4 or another power of two of ranks, and write at least as many tiles"
        )
