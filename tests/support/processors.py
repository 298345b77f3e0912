"""Position weights of features before pooling, in front of tables with CowClip or beside them."""

from dataclasses import replace

import torch
from torch import nn
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from stampede.optim import CowClipAdam, CowClipSGD, cowclip_sharders
from support.gathering import gathered
from support.parity import (
    Case,
    Table,
    build_collection,
    global_batch,
    local_batch,
    plan_of,
    sharded_loss,
)
from support.ranks import process_group
from support.unsharded import Unsharded
from support.updated_tables import computed

CPU = torch.device("cpu")
LR, DENSE_LR = 0.05, 0.05
LONGEST = 3
FIRST = {"t0": 0.3, "t1": -0.2}
TABLES = (Table(40, dim=8), Table(23, dim=8, features=2))


def case_of(plan, rows):
    return Case(plan, TABLES, arguments={"rows": rows}, steps=4, empty_rank=False)


class Model(nn.Module):
    """Tables behind position weights, and tables with CowClip beside them."""

    def __init__(self, case, is_beside):
        super().__init__()
        names = [feature for features in case.features.values() for feature in features]
        self.processed = FeatureProcessedEmbeddingBagCollection(
            build_collection(replace(case, weighted=True), "cpu"),
            PositionWeightedModuleCollection(dict.fromkeys(names, LONGEST)),
        )
        self.beside = build_collection(case, "cpu") if is_beside else None

    def forward(self, features):
        # They share no term of the loss.
        beside = 0.0 if self.beside is None else self.beside(features).values().square().sum()
        return self.processed(features).to_dict(), beside


def train(case, behind, ours):
    """Gradients of the position weights after the first step, tables and weights at the end.

    Args:
        behind: optimizer of the tables behind the position weights.
        ours: whether the sharders are ours, and there are tables with CowClip beside.
    """
    model = Model(case, ours)
    arguments = {"lr": LR}
    if behind is CowClipSGD:
        arguments |= {"clip": None, "rows": case.arguments["rows"]}
    tables = model.processed._embedding_bag_collection.parameters()
    apply_optimizer_in_backward(behind, tables, arguments)
    if ours:
        apply_optimizer_in_backward(CowClipAdam, model.beside.parameters(), {"lr": LR})
    sharders = cowclip_sharders() if ours else get_default_sharders()
    kernel = "dense" if case.plan == "data_parallel" else "fused"
    plan = plan_of(case, model, sharders, [kernel])
    model = DistributedModelParallel(model, device=CPU, plan=plan, sharders=sharders)
    positions = {n: p for n, p in model.named_parameters() if "position_weights" in n}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            for table, value in FIRST.items():
                if f".{table}.weight" in name:
                    parameter.fill_(value)
    dense = torch.optim.SGD(positions.values(), lr=DENSE_LR)
    for step in range(1, case.steps + 1):
        dense.zero_grad()
        loss_of(case, model, local_batch(case, step)).backward()
        if step == 1:
            grads = {n.split(".")[-1]: p.grad.clone() for n, p in positions.items()}
        dense.step()
    found = {n.split(".")[-1]: p.detach().clone() for n, p in positions.items()}
    of_processed = {n: v for n, v in model.state_dict().items() if "processed" in n}
    tables = {n.split(".")[-2]: v for n, v in of_processed.items() if ".embedding_bags." in n}
    return {"grads": grads, "end": {**found, **gathered(tables)}}


def loss_of(case, model, batch):
    beside = []

    def lookup(features):
        looked_up, other = model(features)
        beside.append(other)
        return looked_up

    return sharded_loss(case, lookup, batch) + beside[0]


def reference(case):
    """The same in float64: gradients after the first step, and everything at the end."""
    plain = Unsharded(Model(case, is_beside=False), DENSE_LR, rule="sgd", lr=LR)
    for path, values in plain.weights.items():
        values.fill_(FIRST[path.split(".")[-2]])
    positions = {n.split(".")[-1]: p for n, p in plain.model.named_parameters() if "position" in n}
    for step in range(1, case.steps + 1):
        batch = global_batch(case, step)
        plain.step(lambda model, b=batch: loss_of(case, model, b))
        if step == 1:
            grads = {name: p.grad.clone() for name, p in positions.items()}
    tables = {path.split(".")[-2]: values for path, values in plain.weights.items()}
    return {"grads": grads, "end": {**{n: p.detach() for n, p in positions.items()}, **tables}}


@process_group()
def train_all(cases, others=False):
    """Each case with an optimizer of ours behind the weights.

    Args:
        others: also with SGD behind them, on our sharders and on TorchRec's.
    """
    results = []
    for case in cases:
        with computed(case.way):
            results.append([train(case, CowClipSGD, ours=True)])
            if others:
                results[-1] += [train(case, torch.optim.SGD, ours) for ours in (True, False)]
    return results
