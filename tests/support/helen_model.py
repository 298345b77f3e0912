"""A model that Helen trains, and the same in the float64 re-derivation."""

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce

from support.helen_reference import ReferenceHelen

ROWS = {"user": 40, "item": 12, "wide": 40}
TABLES = ("user", "item")


class Net(nn.Module):
    """Two tables, a first-order table and a small MLP."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(0)
        self.user = nn.Embedding(ROWS["user"], 4, sparse=True)
        self.item = nn.EmbeddingBag(ROWS["item"], 3, sparse=True, mode="sum")
        self.wide = nn.Embedding(ROWS["wide"], 1, sparse=True)
        self.hidden = nn.Linear(7, 6)
        self.out = nn.Linear(6, 1)
        self.to(dtype)

    def forward(self, users, items):
        both = torch.cat([self.user(users), self.item(items)], dim=1)
        return (self.out(torch.tanh(self.hidden(both))) + self.wide(users)).squeeze(1)

    def by_kind(self):
        tables = {self.user.weight, self.item.weight}
        dense = [param for param in self.parameters() if param not in tables]
        return [
            {"params": [self.user.weight, self.item.weight], "kind": "embedding"},
            {"params": dense, "kind": "dense"},
        ]


def logits(weights, users, items):
    """The same model without modules, with dense gradients."""
    both = torch.cat([weights["user.weight"][users], weights["item.weight"][items].sum(1)], dim=1)
    hidden = torch.tanh(both @ weights["hidden.weight"].T + weights["hidden.bias"])
    top = hidden @ weights["out.weight"].T + weights["out.bias"]
    return (top + weights["wide.weight"][users]).squeeze(1)


def batch(step):
    """Ids with heads and tails: some rows many times, most never."""
    draw = torch.Generator().manual_seed(step)
    users = (torch.rand(16, generator=draw) ** 3 * ROWS["user"]).long()
    items = (torch.rand(16, 2, generator=draw) ** 3 * ROWS["item"]).long()
    return users, items, (torch.rand(16, generator=draw) > 0.5).double()


def counts_of(users, items):
    user = torch.bincount(users, minlength=ROWS["user"])
    item = torch.bincount(items.flatten(), minlength=ROWS["item"])
    return {"user.weight": user, "item.weight": item, "wide.weight": user}


def closure_of(model, step):
    users, items, labels = batch(step)

    def closure():
        loss = bce(model(users, items), labels.to(model.out.weight.dtype))
        loss.backward()
        return loss

    return closure


def train(model, optimizer, steps, first=0):
    for step in range(first, first + steps):
        optimizer.zero_grad()
        optimizer.step(closure_of(model, step))


def reference_after(model, steps, change_counts=None, **settings):
    weights = dict(model.named_parameters())
    peer = ReferenceHelen(weights, tuple(f"{name}.weight" for name in TABLES), **settings)
    for step in range(steps):
        users, items, labels = batch(step)
        counts = counts_of(users, items)
        if change_counts:
            counts = {name: change_counts(values) for name, values in counts.items()}
        peer.step(lambda w, u=users, i=items, y=labels: bce(logits(w, u, i), y), counts, step + 1)
    return peer.weights


def largest_difference(model, weights):
    return max(
        float((p.detach().double() - weights[n].detach()).abs().max())
        for n, p in model.named_parameters()
    )


SETTINGS = dict(lr=1e-2, rho=0.3, bound=0.4, weight_decay=1e-2)
