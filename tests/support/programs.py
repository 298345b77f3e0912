"""Programs on sharded tables that tests run in one process or in several."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

import stampede.optim as optim
from stampede.optim import CowClip, TableInit, cowclip_sharders
from support.parity import (
    CLIP,
    DEFAULTS,
    RULES,
    Holder,
    build_collection,
    global_batch,
    local_batch,
    sharded_loss,
    states_of,
    tables_of,
)
from support.unsharded import process_group

CPU = torch.device("cpu")


def shard(module, case, **options):
    """Shard a module whose only tables are those of `case`, with its plan and optimizer."""
    settings = {**DEFAULTS, **case.arguments}
    clip = CowClip(**{k: settings.pop(k) for k in CLIP if k in settings})
    tables = [p for name, p in module.named_parameters() if ".embedding" in name]
    apply_optimizer_in_backward(
        getattr(optim, RULES[case.rule]), tables, {**settings, "clip": clip}
    )
    sharders = cowclip_sharders(TableInit(std=0.1, seed=case.seed), **options)
    world = dist.get_world_size()
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=world, local_world_size=world, compute_device="cpu"),
        batch_size=case.batch // world,
        constraints={
            table: ParameterConstraints(sharding_types=[case.sharding_of(table)], min_partition=4)
            for table in case.names
        },
    )
    plan = planner.collective_plan(module, sharders, dist.group.WORLD)
    kinds = {p.sharding_type for of_module in plan.plan.values() for p in of_module.values()}
    assert kinds == {case.sharding_of(name) for name in case.names}
    return DistributedModelParallel(module, device=CPU, plan=plan, sharders=sharders)


def local_part(case):
    """This rank's samples of a global batch."""
    each = case.batch // dist.get_world_size()
    return slice(dist.get_rank() * each, (dist.get_rank() + 1) * each)


def train(case, model, steps):
    for step in steps:
        sharded_loss(
            case, model, local_batch(global_batch(case, step), local_part(case))
        ).backward()


def everything(case, model):
    """Whole tables and states; on rank 0 only."""
    states = states_of(model.fused_optimizer.state_dict()["state"], case)
    return {"weights": tables_of(model, case), "states": states}


def checkpoint_of(model):
    """What a program hands to DCP; loading writes into these tensors."""
    return {
        "model": model.state_dict(),
        "optimizer": model.fused_optimizer.state_dict(),
    }


def save(cases, folder):
    """Train each case, save it, and take one more step."""
    with process_group():
        found = []
        for index, case in enumerate(cases):
            model = shard(Holder(build_collection(case)), case)
            train(case, model, range(1, 4))
            dcp.save(checkpoint_of(model), checkpoint_id=f"{folder}/{index}")
            saved = everything(case, model)
            train(case, model, [4])
            found.append((saved, everything(case, model)))
        return found


def load(cases, folder):
    """Load each case's checkpoint, under its own plan, and take the next step."""
    with process_group():
        found = []
        for index, case in enumerate(cases):
            model = shard(Holder(build_collection(case)), case)
            train(case, model, [9])  # So that nothing is right by itself.
            into = checkpoint_of(model)
            dcp.load(into, checkpoint_id=f"{folder}/{index}")
            model.load_state_dict(into["model"])
            model.fused_optimizer.load_state_dict(into["optimizer"])
            loaded = everything(case, model)
            train(case, model, [4])
            found.append((loaded, everything(case, model)))
        return found
