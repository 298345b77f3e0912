"""What other TorchRec programs do with tables between two steps, and the same in plain torch.

Each pair is called after every step, with the sharded model and with `ReferenceTables`.
"""

import torch
from torchrec.distributed.comm_ops import set_gradient_division

from stampede.optim import local_cowclip_tables
from support.parity import run_cases

EVICTED = [0, 3, 7, 11, 20, 21, 22]


class Foreign:
    """Reads and writes tables through their parameters, evicts rows, and sets the step.

    Attributes:
        views: of the tables' memory, taken after the first step.
    """

    def __call__(self, model, step):
        if step == 1:
            self.views = [parameter.data for _, parameter in model.named_parameters()]
        elif step == 3:
            with torch.no_grad():
                for _, parameter in model.named_parameters():
                    parameter.mul_(0.5)
        elif step == 4:
            for view in self.views:
                view.add_(0.02)
        elif step == 5:
            evict(model, EVICTED)
        elif step == 6:
            model.fused_optimizer.set_optimizer_step(30)
        elif step == 7:
            seen = [parameter.detach().clone() for _, parameter in model.named_parameters()]
            assert all(map(torch.equal, seen, self.views))
            # What is read is what is stored.
            with torch.no_grad():
                for view, values in zip(self.views, seen, strict=True):
                    view.copy_(2 * values)


def foreign_in_reference(tables, step):
    """The same."""
    for name, weights in tables.weights.items():
        if step == 3:
            weights.mul_(0.5)
        elif step == 4:
            weights.add_(0.02)
        elif step == 5:
            rows = [row for row in EVICTED if row < len(weights)]
            for whole in (weights, tables.first[name], tables.second[name]):
                whole[rows] = 0.0
        elif step == 7:
            weights.mul_(2.0)
    if step == 6:
        tables.t = 30


def evict(model, rows):
    """Begin rows anew, by their numbers in the whole tables, as TorchRec's eviction does."""
    for tbe in local_cowclip_tables(model):
        shards = [part for array in tbe.arrays for part in array.shards]
        for position, part in enumerate(shards):
            local = [row - part.row_offset for row in rows]
            local = torch.tensor([row for row in local if 0 <= row < part.rows]).long()
            tbe.reset_embedding_weight_momentum(
                local, torch.tensor([0, len(local)]), torch.tensor([position]), torch.tensor([0])
            )


def run_without_division(cases):
    """The cases with gradients that TorchRec does not divide by the number of ranks."""
    set_gradient_division(False)
    try:
        return run_cases(cases)
    finally:
        set_gradient_division(True)
