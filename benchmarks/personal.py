"""Are free clients better off than alone once they refine the served model? Figure 3 of the paper, judged again.

    python benchmarks/personal.py run [EXPERIMENT …] [--seeds N] [--rounds N] [--methods A;B] [--save DIR]
    python benchmarks/personal.py table [EXPERIMENT …]        # of finished runs, nothing is run

Runs go into runs/personal/NAME. They may be interrupted and started again: finished runs are kept. The table compares
the test accuracy of every free client with that of two models that it has without a federation: ``alone``, the arm
``local``, which trains as long as the rounds last; and ``scratch``, the same with early stopping on held-out data.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean as mean
from typing import Any

import fedalign as fa
from fedalign.experiments.personal_summary import accuracy_of
from fedalign.paper.compact import data_name
from fedalign.paper.refinement import refinement_section
from fedalign.report.read_runs import read_run

EXPERIMENTS = ("local-fmnist", "local-emnist", "local-cifar10", "synth-low", "synth-medium", "synth-high")
ARMS = ("priority", "all", "fedalign", "auto")
#: As many passes, and as patient, as the training from scratch that they are compared with.
METHODS = "refine(epochs=200, patience=20); ditto(epochs=200, patience=20)"


def run(name: str, options: argparse.Namespace) -> None:
    """Run an experiment with personal models, or the rest of it."""
    methods = [text for text in options.methods.split(";") if text.strip()]
    settings: dict[str, Any] = {
        "arms": ["local", *options.arms.split(",")],
        "personal.methods": methods,
        # It does not depend on the arm, so one arm has it.
        "arm.all": {"rule": "all", "personal": [*methods, options.scratch]},
    }
    for key in ("seeds", "rounds"):
        if getattr(options, key) is not None:
            settings[key] = getattr(options, key)
    if options.clients is not None:
        settings["data.clients"] = options.clients
    if options.emnist and "emnist" in name:
        settings["data.folder"] = options.emnist
    out = options.out / name
    done = fa.run(fa.experiment(name, settings), out, resume="auto", device=options.device, report=False)
    print(done)


def rows(folder: Path) -> Iterator[dict[str, Any]]:
    """Give the figures of every arm and model."""
    tests = read_run(folder).clients
    for arm in (arm for arm in ARMS if arm in tests):
        models = dict.fromkeys(m for clients in tests[arm].values() for c in clients for m in c["personal"])
        for model in ("shared", *models):
            if model != "scratch" or arm == "all":
                yield row(arm, model, tests)


def row(arm: str, model: str, tests: Mapping[str, Mapping[int, Sequence[Mapping[str, Any]]]]) -> dict[str, Any]:
    """Give the figures of an arm and a model: shares are of all seeds together, accuracies and gains in points."""
    own = {(s, c["id"]): accuracy_of(c, "shared") for s, clients in tests["local"].items() for c in clients}
    scratch = {(s, c["id"]): accuracy_of(c, "scratch") for s, clients in tests["all"].items() for c in clients}
    found = {
        (seed, c["id"]): accuracy
        for seed, clients in tests[arm].items()
        for c in clients
        if not c["priority"] and (accuracy := accuracy_of(c, model)) is not None
    }
    over_own = {key: 100 * (mine - (own[key] or 0.0)) for key, mine in found.items()}
    over_scratch = {key: 100 * (mine - (scratch[key] or 0.0)) for key, mine in found.items()}
    return {
        "arm": arm,
        "model": model,
        "accuracy": 100 * mean(found.values()),
        "alone": 100 * mean(own[key] or 0.0 for key in found),
        "better_off": mean(gain > 0 for gain in over_own.values()),
        "worse_off": mean(gain < 0 for gain in over_own.values()),
        "gain": mean(over_own.values()),
        "gain_by_seed": [mean(g for (s, _), g in over_own.items() if s == seed) for seed in tests[arm]],
        "better_off_than_scratch": mean(gain > 0 for gain in over_scratch.values()),
        "gain_over_scratch": mean(over_scratch.values()),
    }


def results(name: str, folder: Path, command: str) -> dict[str, Any]:
    """Give what the results page has of an experiment."""
    run = read_run(folder)
    first = next(iter(run.clients["all"].values()))
    return {
        "experiment": name,
        "data": data_name(run.settings["data"]),
        "command": command,
        "rounds": run.summary["rounds"],
        "seeds": run.summary["seeds"],
        "clients": sum(not c["priority"] for c in first),
        "device": run.summary["device"],
        "seconds": run.summary["seconds"],
        "rows": list(rows(folder)),
    }


def main() -> None:
    """Run experiments, or write the table of those that have finished."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "table"])
    parser.add_argument("experiments", nargs="*", metavar="EXPERIMENT", default=list(EXPERIMENTS))
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--clients", type=int, help="fewer clients than the experiment has, to save time")
    parser.add_argument("--methods", default=METHODS, help="personal methods, with ; between them")
    parser.add_argument("--scratch", default="scratch", help="how clients train alone with early stopping")
    parser.add_argument("--arms", default=",".join(ARMS), help="arms beside local; all must be among them")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--emnist", default="", metavar="FOLDER", help="files of your own in place of EMNIST's")
    parser.add_argument("--out", type=Path, default=Path("runs/personal"))
    parser.add_argument("--save", type=Path, metavar="DIR", help="write the figures for the results page there")
    options = parser.parse_intermixed_args()
    names = options.experiments or EXPERIMENTS
    for name in names:
        if options.what == "run":
            run(name, options)
    found = [
        results(name, options.out / name, command_of(name, options))
        for name in names
        if (options.out / name / "summary.json").exists()
    ]
    print(refinement_section(found))
    for one in found if options.save else ():
        options.save.mkdir(parents=True, exist_ok=True)
        text = json.dumps(one, indent=1, allow_nan=False) + "\n"
        (options.save / f"{one['experiment']}.json").write_text(text, encoding="utf-8")


def command_of(name: str, options: argparse.Namespace) -> str:
    """Write the command that makes the figures of an experiment."""
    words = ["python", "benchmarks/personal.py", "run", name]
    for key, usual in (
        ("seeds", None), ("rounds", None), ("clients", None), ("methods", METHODS), ("scratch", "scratch"),
        ("arms", ",".join(ARMS)), ("device", "auto"),
    ):  # fmt: skip
        if (value := getattr(options, key)) != usual:
            words += [f"--{key}", shlex.quote(str(value))]
    if options.emnist and "emnist" in name:
        words += ["--emnist", Path(options.emnist).name]
    return " ".join(words)


if __name__ == "__main__":
    main()
