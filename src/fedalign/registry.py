"""One registry for everything that settings name: a built-in name, or the user's own ``package.module:Name``.

Python, TOML files, ``--set`` and Flower's settings share two notations: a table ``{kind = "uniform", fraction = 0.3}``,
or a text, ``"uniform(fraction=0.3)"``. Built-ins are references in text, so nothing is imported before it is used.
A new built-in needs one line here.
"""

from __future__ import annotations

from fedalign.settings.lookup import Registry

__all__ = [
    "AGGREGATORS",
    "ALGORITHMS",
    "ATTACKS",
    "CALLBACKS",
    "CLIENT_STEPS",
    "DATA",
    "LOCAL_OPTIMIZERS",
    "LOSSES",
    "METRICS",
    "MODELS",
    "PARTICIPATION",
    "PERSONAL",
    "RULES",
    "SERVER_OPTIMIZERS",
    "SERVER_STEPS",
    "TRACKERS",
    "VALUATIONS",
    "Registry",
]

ALGORITHMS = Registry(
    "algorithm",
    {
        "fedalign": ("fedalign.protocol.fedalign:fedalign", "FedALIGN and FedAvg: one selection a round"),
        "autoalign": ("fedalign.protocol.autoalign:autoalign", "AutoALIGN: the priority clients choose in every round"),
        "blended": ("fedalign.protocol.blended:blended", "AutoALIGN with a weighted mean of the candidates"),
        "verified": ("fedalign.protocol.verified:verified", "rounds in which the priority clients verify free updates"),
        "weighing": (
            "fedalign.protocol.weighing:weighing",
            "all clients are weighed by what priority clients measure",
        ),
        "local-only": ("fedalign.protocol.local_only:local_only", "every client alone, with no server"),
    },
)
RULES = Registry(
    "rule",
    {
        "priority": ("fedalign:PriorityOnly", "FedAvg on the priority clients alone"),
        "all": ("fedalign:Everyone", "FedAvg on all clients, weights in proportion to sample counts"),
        "local": ("fedalign:Alone", "every client alone, with no server"),
        "fedalign": ("fedalign:Align", "FedALIGN: free clients with |F_k − F| ≤ ε"),
        "auto": ("fedalign:AutoAlign", "AutoALIGN: FedALIGN, with ε chosen by the priority clients every round"),
        "blend": ("fedalign:Blend", "AutoALIGN that serves a weighted mean of its candidates"),
        "fedalign-verified": (
            "fedalign:Verified",
            "FedALIGN, verified: free clients are admitted by what priority clients measure",
        ),
        "gradient": (
            "fedalign:GradientAlign",
            "free clients whose update has a cosine of at least `threshold` with the priority clients' mean",
        ),
        "trust": (
            "fedalign:TrustWeighted",
            "FLTrust: free clients' updates weighted by their cosine, scaled in length",
        ),
        "choice": ("fedalign:PowerOfChoice", "power-of-choice: the `clients` free clients with the highest loss"),
        "weighted": ("fedalign:LossWeighted", "FedAvg on all clients, weights times (F_k/F)^`power`"),
        "meritfed": ("fedalign:MeritFed", "MeritFed: weights by mirror descent on the priority loss"),
        "fedgp": ("fedalign:FedGP", "FedGP: the priority update, projected on free clients' updates"),
        "fedda": ("fedalign:FedDA", "FedDA: free clients weighted by noise and distance of updates"),
        "fedgreed": ("fedalign:FedGreed", "FedGreed: the best models, as long as their mean improves"),
        "fedfomo": ("fedalign:FedFomo", "FedFomo: weights by the loss that a single model saves"),
        "maxfl": ("fedalign:MaxFL", "MaxFL: as many clients as possible better off than alone"),
        "finetune": ("fedalign:FineTuned", "FedAvg on all clients, the `last` rounds on priority ones"),
    },
    ("fedalign:Rule", "fedalign:Alone"),
    "a rule (a subclass of fedalign.Rule, or a function that makes one)",
)
MODELS = Registry(
    "model",
    {
        "logistic": ("fedalign.training.models:logistic", "multinomial logistic regression"),
        "linear": ("fedalign.training.models:linear", "a linear model without bias, in double precision"),
        "mlp": ("fedalign.training.models:mlp", "fully connected ReLU layers of the widths `hidden`"),
        "cnn": ("fedalign.training.models:cnn", "the paper's CNN for 32×32 images"),
    },
    ("torch.nn:Module",),
    "a model (a torch.nn.Module, or a function that makes one)",
)
LOSSES = Registry(
    "loss",
    {
        "cross-entropy": ("fedalign:cross_entropy", "for classes, also at every position of a sequence"),
        "binary-cross-entropy": (
            "fedalign:binary_cross_entropy",
            "for two classes with one logit, and for multi-label",
        ),
        "squared-error": ("fedalign:squared_error", "for regression"),
    },
    ("collections.abc:Callable",),
    "a loss (a function of outputs and targets, or a class whose objects are called so)",
    given=2,
)
DATA = Registry(
    "data",
    {
        "synth": ("fedalign.data.synth:Synth", "Synth(alpha, beta): made-up classes, free clients with label noise"),
        "quadratic": ("fedalign.data.convex:Quadratic", "least squares, for the theory"),
        "multinomial": ("fedalign.data.convex:Multinomial", "logistic regression, for the theory"),
        "fmnist": ("fedalign.data.images:FashionMnist", "Fashion-MNIST"),
        "emnist": ("fedalign.data.images:Emnist", "EMNIST"),
        "cifar10": ("fedalign.data.images:Cifar10", "CIFAR-10"),
        "idx": ("fedalign.data.images:Idx", "images in idx files of your own"),
        "folder": (
            "fedalign.experiments.federations:Folder",
            "a folder of .npz, .csv or .parquet files, one for each client",
        ),
    },
    ("fedalign.experiments.federations:FederationSource",),
    "data (a class with a method federation(seed), or a function of the seed that makes a fedalign.Federation)",
    given=1,
)
PARTICIPATION = Registry(
    "participation",
    {
        "full": ("fedalign:Full", "all clients, in every round"),
        "uniform": ("fedalign:Uniform", "a `fraction` of all clients, drawn without replacement"),
        "replacement": ("fedalign:Replacement", "`draws` priority clients, drawn with replacement"),
        "bernoulli": ("fedalign:Bernoulli", "each free client with probability `p`"),
        "trace": ("fedalign:Trace", "who takes part is read from a CSV file"),
    },
    ("fedalign:Participation",),
    "a participation pattern (a subclass of fedalign.Participation)",
)
LOCAL_OPTIMIZERS = Registry(
    "local optimiser",
    {
        "sgd": ("fedalign.training.local:LocalSGD", "SGD, also with momentum, FedProx and SCAFFOLD"),
        "adam": ("fedalign.training.adam:LocalAdam", "Adam"),
        "adamw": ("fedalign.training.adam:LocalAdamW", "Adam with decoupled weight decay"),
    },
    ("fedalign:LocalOptimizer",),
    "a local optimiser (a subclass of fedalign.LocalOptimizer)",
)
SERVER_OPTIMIZERS = Registry(
    "server optimiser",
    {
        "fedavg": ("fedalign.training.server:fedavg", "take the round's mean"),
        "fedavgm": ("fedalign:FedAvgM", "server momentum"),
        "fedadam": ("fedalign:FedAdam", "Adam on the server"),
        "fedyogi": ("fedalign:FedYogi", "Yogi on the server"),
    },
    ("fedalign:ServerOptimizer", "types:NoneType"),
    "a server optimiser (a subclass of fedalign.ServerOptimizer)",
)
AGGREGATORS = Registry(
    "aggregator",
    {
        "mean": ("fedalign.aggregation.aggregator:WeightedMean", "the weighted mean of the updates"),
        "median": ("fedalign.aggregation.median:CoordinateMedian", "the median of every coordinate"),
        "trimmed-mean": (
            "fedalign.aggregation.trimmed_mean:TrimmedMean",
            "the mean of every coordinate without the fraction `trim` at either end",
        ),
        "geometric-median": (
            "fedalign.aggregation.geometric_median:GeometricMedian",
            "the point with the smallest sum of distances",
        ),
        "krum": ("fedalign.aggregation.krum:Krum", "the model that is nearest to its neighbours, with `f` hostile"),
        "multi-krum": (
            "fedalign.aggregation.multi_krum:MultiKrum",
            "the mean of the models that are nearest to their neighbours, without `f`",
        ),
        "centred-clipping": (
            "fedalign.aggregation.centred_clipping:CentredClipping",
            "the mean of updates clipped to `length` around a centre, `steps` times",
        ),
        "norm-clipping": (
            "fedalign.aggregation.norm_clipping:NormClipping",
            "the weighted mean of updates of at most `length`, or of their median length",
        ),
        "nnm": (
            "fedalign.aggregation.nearest_neighbour_mixing:NearestNeighbourMixing",
            "every model mixed with its nearest neighbours without `f`, and `then` another aggregator",
        ),
        "bucketing": (
            "fedalign.aggregation.bucketing:Bucketing",
            "means of random buckets of `size` clients, and `then` another aggregator",
        ),
    },
    ("fedalign:Aggregator",),
    "an aggregator (a subclass of fedalign.Aggregator)",
)
CLIENT_STEPS = Registry(
    "client step",
    {"clip": ("fedalign.aggregation.clip:ClipUpdate", "shorten an update to at most `length`")},
    ("fedalign:ClientStep",),
    "a client step (a subclass of fedalign.ClientStep)",
)
SERVER_STEPS = Registry(
    "server step",
    {
        "length-bound": (
            "fedalign.aggregation.length_bound:LengthBound",
            "refuse a free client's update that is more than `times` times as long as the longest priority one",
        )
    },
    ("fedalign:ServerStep",),
    "a server step (a subclass of fedalign.ServerStep)",
)
ATTACKS = Registry(
    "attack",
    {
        "label-flip": ("fedalign.attacks.data:LabelFlip", "train on flipped labels"),
        "irrelevant": ("fedalign.attacks.data:IrrelevantData", "train on noise with random labels"),
        "backdoor": ("fedalign.attacks.data:Backdoor", "teach the model to take samples with a trigger for `target`"),
        "blended-backdoor": (
            "fedalign.attacks.data:BlendedBackdoor",
            "a backdoor with a faint trigger on the whole image",
        ),
        "sign-flip": ("fedalign.attacks.updates:SignFlip", "the opposite of the update, `scale` times as long"),
        "scaling": ("fedalign.attacks.updates:Scaling", "the update, `factor` times as long"),
        "gaussian": ("fedalign.attacks.updates:Gaussian", "noise, `scale` times as long as the update"),
        "zero": ("fedalign.attacks.updates:Zero", "a free rider that sends the received model back"),
        "copied": ("fedalign.attacks.updates:Copied", "a free rider that sends copies of honest updates"),
        "not-finite": ("fedalign.attacks.updates:NotFinite", "one number that is `value`: nan, inf or -inf"),
        "buffers": ("fedalign.attacks.updates:BadBuffers", "honest weights with negative statistics of BatchNorm"),
        "alie": ("fedalign.attacks.colluding:LittleIsEnough", "the honest mean, moved by `factor` standard deviations"),
        "ipm": ("fedalign.attacks.colluding:InnerProduct", "the opposite of the honest mean, times `factor`"),
        "min-max": ("fedalign.attacks.colluding:MinMax", "as far from the mean as honest updates are apart"),
        "min-sum": ("fedalign.attacks.colluding:MinSum", "as Min-Max, with sums of squared distances"),
        "mimic": ("fedalign.attacks.colluding:Mimic", "all copy one honest client"),
        "at-cosine": ("fedalign.attacks.colluding:AtCosine", "bend the update to a `cosine` with the honest mean"),
        "harmful-direction": (
            "fedalign.attacks.colluding:HarmfulDirection",
            "flipped labels, bent to a `cosine` with the honest mean, `length` times as long",
        ),
        "blend": ("fedalign.attacks.colluding:Blend", "mix the update with the honest mean"),
        "disguise": ("fedalign.attacks.evasion:Disguise", "hide what attackers have in common behind `noise`"),
        "decoys": (
            "fedalign.attacks.evasion:Decoys",
            "`count` attackers are like many, so that the others stand out less",
        ),
    },
    ("fedalign.attacks.attack:Attack",),
    "an attack (a subclass of fedalign.attacks.attack.Attack)",
)
PERSONAL = Registry(
    "personal method",
    {
        "refine": ("fedalign.personal.refine:Refine", "go on from the served model on the client's own data"),
        "ditto": ("fedalign.personal.ditto:Ditto", "Ditto: refine with a pull of weight `mu` towards the served model"),
        "fedfomo": (
            "fedalign.personal.fedfomo:PersonalFedFomo",
            "FedFomo: mix the models of other clients by one's own held-out loss",
        ),
        "local-head": ("fedalign.personal.local_head:LocalHead", "train the head of the served model alone (FedRep)"),
        "scratch": (
            "fedalign.personal.refine:FromScratch",
            "train the initial model alone with early stopping, to compare with",
        ),
    },
    ("fedalign:PersonalMethod",),
    "a personal method (a subclass of fedalign.PersonalMethod)",
)
VALUATIONS = Registry(
    "valuation",
    {
        "gtg-shapley": ("fedalign.ledger.gtg_shapley:GTGShapley", "Shapley values from sampled orders, with intervals"),
        "exact": ("fedalign.ledger.exact:ExactShapley", "Shapley values from all coalitions of at most `most` clients"),
        "leave-one-out": ("fedalign.ledger.exact:LeaveOneOut", "what is lost if one client is missing"),
    },
    ("fedalign:Valuation",),
    "a valuation (a subclass of fedalign.Valuation)",
)
METRICS = Registry(
    "metric",
    {
        "accuracy": ("fedalign.metrics.classification:accuracy", "the fraction of correct predictions"),
        "balanced-accuracy": ("fedalign.metrics.classification:balanced_accuracy", "the mean recall of the classes"),
        "f1": ("fedalign.metrics.classification:f1", "F1, averaged over classes; `average`: macro, micro or none"),
        "precision": ("fedalign.metrics.classification:precision", "the precision of each class"),
        "recall": ("fedalign.metrics.classification:recall", "the recall of each class"),
        "auc": ("fedalign.metrics.classification:auc", "the area under the ROC curve, one class against the others"),
        "top-k": ("fedalign.metrics.classification:top_k", "whether the class is among the `k` highest scores"),
        "ece": ("fedalign.metrics.classification:calibration_error", "the expected calibration error"),
        "mae": ("fedalign.metrics.regression:mean_absolute_error", "the mean absolute error"),
        "rmse": ("fedalign.metrics.regression:root_mean_squared_error", "the root mean squared error"),
        "r2": ("fedalign.metrics.regression:r2", "the coefficient of determination"),
    },
    wanted="a metric (a function of outputs and targets, or a class as those of torchmetrics)",
    given=2,
)
_TRACKERS = {
    "tensorboard": ("fedalign.tracking.tensorboard:TensorBoard", "curves, decisions and pictures for TensorBoard"),
    "mlflow": ("fedalign.tracking.mlflow:MLflow", "runs of MLflow, in a database file or on a server"),
    "wandb": ("fedalign.tracking.wandb:WandB", "runs of Weights & Biases, offline or on a server"),
}
TRACKERS = Registry(
    "tracker", _TRACKERS, ("fedalign:Callback",), "a tracker (a subclass of fedalign.Callback)"
)  # fmt: skip
CALLBACKS = Registry(
    "callback",
    {
        "early-stopping": ("fedalign:EarlyStopping", "stop a run when a figure no longer improves"),
        "best-round": ("fedalign:BestRound", "keep the model of the best round, best.safetensors"),
        **_TRACKERS,
    },
    ("fedalign:Callback",),
    "a callback (a subclass of fedalign.Callback)",
)
