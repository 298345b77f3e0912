"""Mistakes in the configuration."""

import re

from stampede.engine.config import config_type
from stampede.settings import all_keys
from support.soak.faults.kind import Meeting, kind


@kind("key misspelled", 12, 2, begun=True)
def key_misspelled(case):
    known = [key.path for key in all_keys(config_type())]
    key = case.draw.choice(known)
    while key in known:
        key = list(case.draw.choice(known))
        place = case.draw.randrange(len(key))
        key[place : place + case.draw.randrange(2)] = case.draw.choice("abcdefghijklmnopqrstuvwxyz")
        key = "".join(key)
    yield Meeting(re.escape(key.split(".")[0]), (f"{key}=1",))


@kind("key changed that may not be", 8, 2, begun=True)
def key_changed(case):
    changed = case.draw.choice([
        "model.dim=7", "model.hidden=[8]", "model.name=lr", "train.batch_size=63", "run.seed=9",
        "optim.embedding.l2=0.5", "optim.embedding.optimizer=sgd", "optim.scaling.rule=linear",
        "optim.dense.betas=[0.8,0.9]", "evaluate.select_on=validation",
    ])  # fmt: skip
    yield Meeting(r"cannot be continued|select_on", (changed,))
