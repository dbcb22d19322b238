"""What every client sends in the first round, trained one by one with the plain engine."""

import torch

import fedalign as fa
from fedalign.simulation.engine.jobs import Data, TrainJob
from fedalign.simulation.engine.reference import ReferenceEngine
from fedalign.simulation.spec import initial_module


def first_models(fed, make, local, loss=fa.cross_entropy, seed=0):
    """Give the flat initial model and every client's flat model after the first round."""
    engine = ReferenceEngine(initial_module(make, seed), loss, Data([fed.pool], torch.device("cpu"), torch.float32))
    start = engine.layout.flatten(initial_module(make, seed))
    jobs = [TrainJob(start, fed.pool, client.train, local, seed, 0, 1, k) for k, client in enumerate(fed.clients)]
    trained = {done.job: done.model for done in engine.train(jobs)}
    return start, [trained[k] for k in range(len(fed))]
