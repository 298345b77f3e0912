"""The model of a configuration, how its dense layers compute, and the job that trains it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchrec.distributed.model_parallel import DistributedModelParallel

from stampede.engine.config import Config
from stampede.models import CTRModel, EmbeddingFront
from stampede.optim import BackwardUpdate, DenseAdam, Scaled
from stampede.settings import SettingsError


@dataclass(frozen=True)
class DensePrecision:
    """The precision of the dense layers, and the reason, which is logged.

    With bf16, sums and weights stay float32; with tf32, a GPU rounds the inputs of products.
    """

    is_bf16: bool
    reason: str
    is_tf32: bool = False

    @contextmanager
    def computing(self, device: torch.device) -> Iterator[None]:
        """The context of the dense layers' forward and backward."""
        before = torch.get_float32_matmul_precision()
        if self.is_tf32:
            torch.set_float32_matmul_precision("high")
        try:
            with torch.autocast(device.type, torch.bfloat16, enabled=self.is_bf16):
                yield
        finally:
            if self.is_tf32:
                torch.set_float32_matmul_precision(before)


@dataclass
class Job:
    """A sharded model with its optimizers; `table_update` updates the tables in backward.

    Attributes:
        scaling: settings at the base batch size and at the configured one.
        seed: of random numbers in the dense layers, such as dropout.
        skips_nonfinite: whether to skip a batch whose loss is not finite.
    """

    model: DistributedModelParallel
    dense_parameters: dict[str, Tensor]
    dense_optimizer: DenseAdam
    scaling: Scaled
    precision: DensePrecision
    table_update: BackwardUpdate | None = None
    seed: int = 0
    skips_nonfinite: bool = False

    @property
    def ctr_model(self) -> CTRModel:
        """The model without its wrappers."""
        return self.model.module

    @property
    def dense_buffers(self) -> dict[str, Tensor]:
        """Buffers of the network, such as BatchNorm's running mean, by name."""
        return dict(self.ctr_model.network.named_buffers(prefix="network"))

    @property
    def front(self) -> EmbeddingFront:
        """The module with the tables."""
        return self.ctr_model.front

    def set_learning_rates(self, embedding: float, dense: float) -> None:
        """Set the rates of the tables and of the dense layers for the next step."""
        for group in self.dense_optimizer.param_groups:
            group["lr"] = dense
        for group in self.model.fused_optimizer.param_groups:
            group["lr"] = embedding
        # Fused tables are updated in backward; step() only passes on the rate.
        self.model.fused_optimizer.step()

    def state(self, rank: int) -> dict[str, Any]:
        """All trained tensors, to be read and written in place, and this rank's random state.

        Brings all rows of the tables up to date. All ranks must call it at the same point.
        """
        return {
            "model": self.model.state_dict(),
            "fused": self.model.fused_optimizer.state_dict()["state"],
            "dense": {
                name: self.dense_optimizer.state[parameter]
                for name, parameter in self.dense_parameters.items()
            },
            "random": {f"rank_{rank}": torch.get_rng_state()},
        }


class ModelInputs(Protocol):
    """What a model is built for; see `stampede.data.Dataset`."""

    vocabulary_sizes: Mapping[str, int]
    numbers: int
    shared: Mapping[str, str]
    mean: Sequence[str]


def build_model(config: Config, data: ModelInputs) -> CTRModel:
    """The model before sharding: its tables are on `meta`."""
    return CTRModel(
        config.model.name,
        data.vocabulary_sizes,
        data.numbers,
        config.model.dim,
        config.model.hidden,
        config.run.seed,
        config.model.options,
        shared=data.shared,
        mean=data.mean,
        first_order_scale=config.model.first_order_scale,
        dropout=config.model.dropout,
        normalization=config.model.normalization,
    )


def move_dense(model: CTRModel, device: torch.device) -> None:
    """Move all but the tables, which get their memory in sharding."""
    for child in model.children():
        if child is not model.front:
            child.to(device)
    model.bias.data = model.bias.data.to(device)


def choose_precision(asked: str, device: torch.device) -> DensePrecision:
    """The requested precision if the device supports it and is not slower with it, else `fp32`.

    `auto` requests `bf16`. Without CPU instructions for it, bf16 is many times slower than float32,
    so both are timed.
    """
    if asked == "fp32":
        return DensePrecision(False, "fp32")
    wanted = "bf16" if asked == "auto" else asked
    instead = "fp32" if asked == "auto" else f"fp32 instead of {asked}"
    if device.type == "cuda":
        if torch.cuda.get_device_capability(device) >= (8, 0):
            return DensePrecision(wanted == "bf16", wanted, is_tf32=wanted == "tf32")
        return DensePrecision(False, f"{instead}: this GPU does not support {wanted}")
    if wanted == "tf32":
        return DensePrecision(False, f"{instead}: a CPU does not support tf32")
    ratio = _speed_of_bf16()
    if ratio > 1.0:
        return DensePrecision(True, f"bf16, {ratio:.1f} times as fast as fp32 on this CPU")
    longer = f"{1 / ratio:.1f} times as long on this CPU"
    return DensePrecision(False, f"{instead}: bf16 takes {longer}")


def _speed_of_bf16(rows: int = 2048, width: int = 400, repeats: int = 3) -> float:
    """Speed of a layer's forward and backward in bf16, relative to float32."""
    with torch.random.fork_rng():
        layer, batch = nn.Linear(width, width), torch.randn(rows, width, requires_grad=True)
    seconds = {}
    for bf16 in (False, True):
        found = []
        for _ in range(repeats + 1):
            start = time.perf_counter()
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                out = functional.relu(layer(batch))
            out.float().sum().backward()
            found.append(time.perf_counter() - start)
        # The first repeat also sets up libraries.
        seconds[bf16] = min(found[1:])
    return seconds[False] / seconds[True]


def compile_network(network: nn.Module, how: str, device: torch.device) -> None:
    """Compile a network's forward and backward with `torch.compile` at its first call.

    Every batch size is compiled separately, up to 8: there are few (full and last batches of
    training and evaluation), and an epoch's last batch must not slow down the others.
    `cuda_graphs` also records each size's launches as one graph.
    """
    if how == "none":
        return
    if how == "cuda_graphs" and device.type != "cuda":
        raise SettingsError(
            "train.compile: found 'cuda_graphs', but this run is on the CPU; write "
            "train.compile=default or none"
        )
    network.compile(dynamic=False, mode="reduce-overhead" if how == "cuda_graphs" else None)
