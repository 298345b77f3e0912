"""Train with Ray Train: `python on_ray.py CONFIG.yaml WORKERS`; needs the extra `ray`."""

import sys
from pathlib import Path
from typing import Any

import ray
import yaml
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from stampede import open_run, train


def work(config: dict[str, Any]) -> None:
    """What each worker does, once Ray has connected them."""
    # Checkpoints and metrics go to run.dir, so there is nothing to report to Ray.
    train(config)


def fit(config: dict[str, Any], workers: int) -> None:
    """Train with so many workers, each with a GPU if there are any."""
    ray.init(ignore_reinit_error=True)
    use_gpu = "GPU" in ray.cluster_resources()
    TorchTrainer(
        work,
        # Not the name of the file, which other machines do not have.
        train_loop_config=config,
        # stampede exchanges tensors of CPUs, too; Ray's own choice for GPUs is NCCL alone.
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if use_gpu else "gloo"),
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=use_gpu),
        run_config=RunConfig(
            name=config["run"]["name"],
            # For Ray's notes on the run; a cluster needs a place that all its machines reach.
            storage_path=config["run"]["dir"] + "-ray",
            # Workers that start again continue, as the configuration says checkpoint.resume=auto.
            failure_config=FailureConfig(max_failures=3),
        ),
    ).fit()


if __name__ == "__main__":
    given = yaml.safe_load(Path(sys.argv[1]).read_text())
    fit(given, int(sys.argv[2]))
    print(open_run(f"{given['run']['dir']}/{given['run']['name']}"))
