"""Train with Ray Train: `python on_ray.py CONFIG.yaml [WORKERS]`; needs the extra `ray`."""

import sys
from pathlib import Path
from typing import Any

import ray.train
import yaml
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def work(config: dict[str, Any]) -> None:
    """What each worker does; the process group of Ray is there."""
    import stampede

    run = stampede.train(config)
    # Every worker must report. The model is in run.dir already, so there is no checkpoint to give.
    ray.train.report({part: one["auc"] for part, one in run.metrics.items()})


def fit(config: dict[str, Any], workers: int, use_gpu: bool, storage: str) -> Any:
    """Train a configuration; Ray's result."""
    # stampede exchanges tensors of CPUs too; Ray's default for GPUs is NCCL alone.
    backend = "cpu:gloo,cuda:nccl" if use_gpu else "gloo"
    return TorchTrainer(
        work,
        # Not the file's name: workers have other folders.
        train_loop_config=config,
        torch_config=TorchConfig(backend=backend),
        scaling_config=ScalingConfig(num_workers=workers, use_gpu=use_gpu),
        # A restarted worker group continues, as the configuration says checkpoint.resume=auto.
        run_config=RunConfig(
            name=config["run"]["name"],
            # For Ray's own notes.
            storage_path=storage,
            failure_config=FailureConfig(max_failures=3),
        ),
    ).fit()


if __name__ == "__main__":
    given = yaml.safe_load(Path(sys.argv[1]).read_text())
    number = int(sys.argv[2]) if len(sys.argv) > 2 else 2
    print(fit(given, number, use_gpu=False, storage=given["run"]["dir"] + "/ray").metrics)
