"""Three priority clients, one honest free client and three free clients for attackers: samples of one linear task."""

import torch

import fedalign as fa
from fedalign.attacks.adversary import Adversary
from fedalign.flower import ClientData
from fedalign.simulation.api import simulate_many
from fedalign.simulation.spec import RunSpec

CLIENTS, PRIORITY, HOSTILE = 7, 3, range(4, 7)
FEATURES, CLASSES = 6, 4
LR = 0.5
# Hostile clients have less data, so that their long updates are not refused.
ATTACKS = "backdoor(target=1, size=1, poisoned=0.3); scaling(factor=9.9)"


def model():
    return torch.nn.Linear(FEATURES, CLASSES)


def samples(count, seed):
    """Draw samples whose classes a linear model can tell, but for one in seven with another label."""
    weights = torch.randn(FEATURES, CLASSES, generator=torch.Generator().manual_seed(999))
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, FEATURES, generator=draw)
    wrong = torch.rand(count, generator=draw) < 0.15
    return x, ((x @ weights).argmax(1) + wrong) % CLASSES


def parts(k):
    """Return the splits of client k."""
    train = 60 if k < PRIORITY else 240 if k == PRIORITY else 40
    sizes = {"train": train, "heldout": 100, "test": 200}
    return {split: samples(count, 10 * k + i) for i, (split, count) in enumerate(sizes.items())}


def data(node_config):
    return ClientData(**parts(int(node_config["partition-id"])))


def hostile_config(attacks=ATTACKS):
    """Return the node config of a hostile node."""
    return {"attacks": attacks, "classes": CLASSES, "samples": 50.0}


def hostile_run(rule, rounds, attacks=ATTACKS):
    """Simulate the federation with the caps of a deployment."""
    splits = [[parts(k)[split] for k in range(CLIENTS)] for split in ("train", "heldout", "test")]
    names = [f"site-{k}" for k in range(CLIENTS)]
    priority = [k < PRIORITY for k in range(CLIENTS)]
    data = fa.Federation.from_arrays(*splits, priority=priority, heldout_fraction=0, names=names)
    hostile = Adversary(attacks.split(";"), clients=[names[k] for k in HOSTILE], samples=50.0, knows="own")
    local, caps = fa.LocalSGD(lr=LR, epochs=2, batch_size=20), [fa.LengthBound(10.0)]
    spec = RunSpec(data, rule, rounds, 0.0, local, adversary=hostile, free_cap=1.0, server_steps=caps)
    return simulate_many([spec], model, device="cpu")[0]
