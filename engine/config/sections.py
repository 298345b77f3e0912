"""The configuration: one model per section; descriptions become the help."""

from __future__ import annotations

import functools
from typing import Literal

from pydantic import Field, create_model, model_validator

from stampede.engine.compilation import Compilation
from stampede.engine.config.data import DataSection, RawSection, SyntheticSection
from stampede.engine.config.divergence import DivergenceSection
from stampede.engine.config.embedding_optimizers import (
    AdamSection,
    EmbeddingOptimSection,
)
from stampede.engine.config.evaluate import EvaluateSection
from stampede.engine.config.model import ModelSection, registered_networks, section_of
from stampede.engine.config.presets import Preset
from stampede.engine.config.profile import ProfileSection
from stampede.engine.config.schedule import (
    DenseScheduleSection,
    PlateauSection,
    ScheduleSection,
)
from stampede.engine.precision import Precision
from stampede.models import Network
from stampede.optim import ScalingRule
from stampede.optim.baselines import BASELINE_SHARDING_TYPES, BASELINES
from stampede.optim.rules import EpsPlacement
from stampede.optim.sharded.supported import SHARDING_TYPES
from stampede.settings import Beta, Section, Seed

_Plan = Literal[("auto", *SHARDING_TYPES)]


class RunSection(Section):
    """The run as a whole."""

    name: str = Field("", description="name of the run folder; default: the file's name")
    dir: str = Field("runs", description="folder that holds the run folders")
    seed: Seed = Field(0, description="seed of initial weights and order of rows")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto takes a GPU where there is one"
    )
    overwrite: bool = Field(False, description="delete an existing run folder of that name first")
    hang_seconds: float = Field(
        600,
        ge=0,
        description="seconds without progress on any rank after which the processes end with "
        "status 3 and the stuck rank is named; the first step has ten minutes more; 0: never",
    )
    slow_hang_seconds: float = Field(
        24 * 3600,
        gt=0,
        description="the same in saves, in the metrics of an evaluation and other stages that take "
        "as long as the data are large, where it is longer",
    )


class DenseOptimSection(Section):
    """The optimizer of the dense layers, at the base batch size."""

    lr: float | None = Field(
        None, ge=0, description="learning rate, which the schedule changes; null: by the recipe"
    )
    schedule: DenseScheduleSection = DenseScheduleSection()
    plateau: PlateauSection = PlateauSection()
    betas: tuple[Beta, Beta] = Field(
        (0.9, 0.999), description="decay rates of the two moments", strict=False
    )
    eps: float = Field(1e-7, gt=0, description="Adam's epsilon")
    eps_placement: EpsPlacement = Field(
        "keras", description="epsilon before (keras) or after (torch) the bias correction"
    )
    weight_decay: float = Field(
        0.0,
        ge=0,
        description="decoupled decay (AdamW), w = w * (1 - lr*weight_decay), of the matrices: not "
        "of biases, norms and first-order weights; no rule scales it",
    )


class ScalingSection(Section):
    """How the settings above change with the batch size."""

    rule: ScalingRule | None = Field(
        None, description="scaling rule; none changes nothing; null: by the recipe"
    )
    base_batch_size: int | None = Field(
        None,
        ge=1,
        description="global batch size for which the settings above are meant; null: by the recipe",
    )


class OptimSection(Section):
    """Optimizers."""

    embedding: EmbeddingOptimSection = AdamSection()
    dense: DenseOptimSection = DenseOptimSection()
    scaling: ScalingSection = ScalingSection()


class TrainSection(Section):
    """The training loop."""

    batch_size: int | None = Field(
        None, ge=1, description="samples of a global batch, over all ranks; null: by the recipe"
    )
    epochs: int | None = Field(
        None, ge=1, description="passes over the training rows; null: by the recipe"
    )
    precision: Precision = Field(
        "fp32",
        description="of the dense layers; tf32 is for GPUs, bf16 is taken where it is faster",
    )
    compile: Compilation = Field(
        "none",
        description="of the network, by torch.compile; cuda_graphs, on a GPU, also launches it as "
        "one; on a CPU the network then goes without the C++ kernels",
    )
    log_every: int = Field(20, ge=1, description="steps between two lines of metrics.jsonl")
    clip_stats_every: int = Field(
        0,
        ge=0,
        description="steps between counts of clipped rows by field and by occurrences of the id, "
        "for the report; 0: none",
    )
    on_nonfinite: Literal["error", "skip_batch"] = Field(
        "error",
        description="what a batch does whose loss is not finite: error stops; skip_batch leaves it "
        "out, but ten in a row are an error (on a GPU the loss is then waited for in each step)",
    )
    on_divergence: DivergenceSection = DivergenceSection()
    timing_every: int = Field(
        500,
        ge=0,
        description="steps between two looks at the times of steps, by phase and on all ranks, and "
        "at the slowest rank; 0: none",
    )
    profile: ProfileSection = ProfileSection()


class CheckpointSection(Section):
    """Checkpoints, after every evaluated epoch and when a signal stops the run."""

    resume: Literal["never", "auto"] = Field(
        "never", description="auto continues from the newest checkpoint of the run folder"
    )
    init_from: str = Field(
        "",
        description="checkpoint, or run folder (its best epoch), whose weights a new run begins "
        "with, rows of tables by their ids; relative to the working folder",
    )
    every_steps: int = Field(
        0, ge=0, description="steps between further checkpoints within an epoch; 0: none"
    )
    every_minutes: float = Field(
        0, ge=0, description="minutes between further checkpoints within an epoch; 0: none"
    )
    keep: int = Field(
        2, ge=1, description="newest checkpoints to keep, besides that of the best epoch"
    )
    keep_every: int = Field(
        0, ge=0, description="epochs between checkpoints that are kept besides; 0: none"
    )
    asynchronous: bool = Field(
        True, description="training goes on while a checkpoint is written, from a copy in memory"
    )


class ShardingSection(Section):
    """Where the tables are."""

    plan: _Plan = Field(
        "auto", description="sharding type of all tables; auto: TorchRec's planner decides"
    )


class Config(Section):
    """A whole job."""

    preset: Preset = Field(
        "auto",
        description="values of the keys that are not given. auto: the recipe chooses those that "
        "are null by what the training part shows, and prints them; paper: as the CowClip paper "
        "(arXiv 2204.06240)",
    )
    run: RunSection = RunSection()
    data: DataSection = SyntheticSection()
    model: ModelSection = ModelSection()
    optim: OptimSection = OptimSection()
    train: TrainSection = TrainSection()
    evaluate: EvaluateSection = EvaluateSection()
    checkpoint: CheckpointSection = CheckpointSection()
    sharding: ShardingSection = ShardingSection()

    @model_validator(mode="after")
    def _check_sections_together(self) -> Config:
        # A prepared folder tells only when it is opened.
        no_validation = getattr(self.data, "validation_fraction", None) == 0
        if isinstance(self.data, RawSection):
            no_validation = no_validation and not self.data.validation_given()
        if self.evaluate.select_on == "validation" and no_validation:
            raise ValueError(
                "evaluate.select_on is 'validation' but data.validation_fraction is 0; write a "
                "fraction above 0, or evaluate.select_on: test"
            )
        if self.run.overwrite and self.checkpoint.resume == "auto":
            raise ValueError(
                "run.overwrite=true would delete the checkpoints that checkpoint.resume=auto is "
                "to continue from; write only one of them"
            )
        optimizer, plan = self.optim.embedding.optimizer, self.sharding.plan
        if optimizer in BASELINES and plan not in ("auto", *BASELINE_SHARDING_TYPES):
            raise ValueError(
                f"sharding.plan is {plan!r}, which is not exact with FBGEMM's own "
                f"{optimizer!r}; write auto, {', '.join(BASELINE_SHARDING_TYPES)}, or another "
                "optim.embedding.optimizer"
            )
        clip = getattr(self.optim.embedding, "clip", None)
        if self.train.clip_stats_every and (clip is None or not clip.as_clip(None).by_row):
            raise ValueError(
                f"train.clip_stats_every is {self.train.clip_stats_every}, but "
                f"optim.embedding.optimizer {optimizer!r} clips no single rows here; write 0, or "
                "optim.embedding.clip.granularity: cowclip or row"
            )
        if self.train.compile == "cuda_graphs":
            self._check_cuda_graphs()
        for part in ("embedding", "dense"):
            _check_room_for_decay(part, getattr(self.optim, part).schedule, self.train.epochs)
        return self

    def _check_cuda_graphs(self) -> None:
        said = "train.compile: found 'cuda_graphs', but "
        instead = "; write train.compile: default or none"
        if self.run.device == "cpu":
            raise ValueError(f"{said}run.device is 'cpu'{instead}")
        if self.optim.embedding.optimizer == "helen":
            # The second pass would overwrite the gradients of the first, which are kept.
            raise ValueError(
                f"{said}a step of optim.embedding.optimizer 'helen' has two passes{instead}"
            )


def _check_room_for_decay(part: str, schedule: ScheduleSection, epochs: int | None) -> None:
    if epochs is None or schedule.decay in (None, "constant"):
        return
    if schedule.unit == "epochs" and (schedule.warmup or 0) >= epochs:
        key = f"optim.{part}.schedule"
        raise ValueError(
            f"{key}.decay is {schedule.decay!r}, but the warm-up of {schedule.warmup:g} epochs "
            f"lasts as long as the training, train.epochs {epochs}; write a {key}.warmup below "
            f"{epochs}, more epochs, or {key}.decay: constant"
        )


def config_type() -> type[Config]:
    """`Config` with the options of every network that is registered now."""
    return _config_type(registered_networks())


# A class takes milliseconds to make, and configurations that are compared must have the same one.
@functools.lru_cache
def _config_type(networks: tuple[Network, ...]) -> type[Config]:
    section = section_of(networks)
    return create_model("Config", __base__=Config, __doc__=Config.__doc__, model=(section, ...))
