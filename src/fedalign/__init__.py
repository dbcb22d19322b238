"""Prioritized federated learning: let free clients in only when that serves the clients that matter.

>>> import fedalign as fa, torch
>>> x, y = torch.randn(60, 4), torch.arange(60) % 3
>>> fed = fa.Federation.from_arrays([(x[:30], y[:30]), (x[30:], y[30:])], priority=[True, False])
>>> result = fa.simulate(fed, lambda: torch.nn.Linear(4, 3), fa.Align(epsilon=0.2), rounds=5)
>>> result.history[4].admitted <= 1
True
"""

from fedalign.aggregation.aggregator import AggregateContext, Aggregator, ContextAggregator, WeightedMean
from fedalign.aggregation.bucketing import Bucketing
from fedalign.aggregation.centred_clipping import CentredClipping
from fedalign.aggregation.clip import ClipUpdate
from fedalign.aggregation.geometric_median import GeometricMedian
from fedalign.aggregation.krum import Krum
from fedalign.aggregation.length_bound import LengthBound
from fedalign.aggregation.median import CoordinateMedian
from fedalign.aggregation.multi_krum import MultiKrum
from fedalign.aggregation.nearest_neighbour_mixing import NearestNeighbourMixing
from fedalign.aggregation.norm_clipping import NormClipping
from fedalign.aggregation.trimmed_mean import TrimmedMean
from fedalign.aggregation.update_steps import ClientStep, ServerStep, UpdateContext
from fedalign.attacks.adversary import Adversary
from fedalign.attacks.attack import Attack
from fedalign.callbacks import Callback, RunInfo, Stopped
from fedalign.control.best_round import BestRound
from fedalign.control.early_stopping import EarlyStopping
from fedalign.data.federation import Client, Federation
from fedalign.data.samples import Pool
from fedalign.errors import DivergedError, FedalignError, FederationWarning
from fedalign.experiments.api import Experiment, experiment, run
from fedalign.experiments.result import ArmRun, ExperimentResult
from fedalign.ledger.ledger import Ledger
from fedalign.ledger.valuation import Estimate, Game, Valuation
from fedalign.metrics.metric import Metric
from fedalign.personal.ditto import Ditto
from fedalign.personal.fedfomo import PersonalFedFomo
from fedalign.personal.local_head import LocalHead
from fedalign.personal.method import PersonalMethod, PersonalOutcome
from fedalign.personal.refine import FromScratch, Refine
from fedalign.protocol.metric_values import MetricValues
from fedalign.protocol.records import ClientRound, History, RoundRecord, Tried
from fedalign.rules.align import Align
from fedalign.rules.auto import AutoAlign
from fedalign.rules.baselines import Alone, Everyone, PriorityOnly
from fedalign.rules.blend import Blend
from fedalign.rules.fedfomo import FedFomo
from fedalign.rules.fedgp import FedDA, FedGP
from fedalign.rules.fedgreed import FedGreed
from fedalign.rules.finetune import FineTuned
from fedalign.rules.legacy import candidate as Candidate
from fedalign.rules.literature import GradientAlign, LossWeighted, PowerOfChoice, TrustWeighted
from fedalign.rules.maxfl import MaxFL
from fedalign.rules.meritfed import MeritFed
from fedalign.rules.rule import Broadcast, Measure, Offer, Rule, Selection, Similarity
from fedalign.rules.verified import Verified
from fedalign.rules.weighing import Weighed, WeighingRule
from fedalign.simulation.api import simulate, simulate_many
from fedalign.simulation.simulation import SimulationResult
from fedalign.simulation.spec import RunSpec
from fedalign.training.adam import LocalAdam, LocalAdamW
from fedalign.training.local import LocalSGD
from fedalign.training.losses import binary_cross_entropy, cross_entropy, squared_error
from fedalign.training.optimizer import LocalOptimizer
from fedalign.training.participation import Bernoulli, Full, Participation, Presence, Replacement, Trace, Uniform
from fedalign.training.schedules import Constant, Cosine, Exponential, InverseTime, Linear, Piecewise, Schedule, Step
from fedalign.training.server import FedAdam, FedAvgM, FedYogi, ServerOptimizer

__version__ = "0.2.0"

__all__ = [
    "Adversary",
    "AggregateContext",
    "Aggregator",
    "Align",
    "Alone",
    "ArmRun",
    "Attack",
    "AutoAlign",
    "Bernoulli",
    "BestRound",
    "Blend",
    "Broadcast",
    "Bucketing",
    "Callback",
    "Candidate",
    "CentredClipping",
    "Client",
    "ClientRound",
    "ClientStep",
    "ClipUpdate",
    "Constant",
    "ContextAggregator",
    "CoordinateMedian",
    "Cosine",
    "Ditto",
    "DivergedError",
    "EarlyStopping",
    "Estimate",
    "Everyone",
    "Experiment",
    "ExperimentResult",
    "Exponential",
    "FedAdam",
    "FedAvgM",
    "FedDA",
    "FedFomo",
    "FedGP",
    "FedGreed",
    "FedYogi",
    "FedalignError",
    "Federation",
    "FederationWarning",
    "FineTuned",
    "FromScratch",
    "Full",
    "Game",
    "GeometricMedian",
    "GradientAlign",
    "History",
    "InverseTime",
    "Krum",
    "Ledger",
    "LengthBound",
    "Linear",
    "LocalAdam",
    "LocalAdamW",
    "LocalHead",
    "LocalOptimizer",
    "LocalSGD",
    "LossWeighted",
    "MaxFL",
    "Measure",
    "MeritFed",
    "Metric",
    "MetricValues",
    "MultiKrum",
    "NearestNeighbourMixing",
    "NormClipping",
    "Offer",
    "Participation",
    "PersonalFedFomo",
    "PersonalMethod",
    "PersonalOutcome",
    "Piecewise",
    "Pool",
    "PowerOfChoice",
    "Presence",
    "PriorityOnly",
    "Refine",
    "Replacement",
    "RoundRecord",
    "Rule",
    "RunInfo",
    "RunSpec",
    "Schedule",
    "Selection",
    "ServerOptimizer",
    "ServerStep",
    "Similarity",
    "SimulationResult",
    "Step",
    "Stopped",
    "Trace",
    "Tried",
    "TrimmedMean",
    "TrustWeighted",
    "Uniform",
    "UpdateContext",
    "Valuation",
    "Verified",
    "Weighed",
    "WeighingRule",
    "WeightedMean",
    "binary_cross_entropy",
    "cross_entropy",
    "experiment",
    "run",
    "simulate",
    "simulate_many",
    "squared_error",
]
