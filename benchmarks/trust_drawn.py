"""The verified rule in federations that are drawn at random, under attacks that are combined at random.

Nobody chose these federations: number ``i`` draws the data set, its split among the clients, how many clients there are
and how many of them have priority, the samples of a client, the model, the local work and the number of rounds. Each
has three random attacks (``trust.py``) on a random part of the free clients, a run without attack, one of ``auto``
without attack, and one in which the hostile clients send nothing. Prints a line for each federation, in points of test
accuracy above ``priority``, and then how often the rule is behind. With ``--out`` an interrupted benchmark continues
where it stopped.

    python benchmarks/trust_drawn.py [--count 60] [--first 0] [--data fmnist,emnist,cifar10] [--set within=4.0]
                                     [--workers 2] [--out FILE.jsonl]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import sys
import warnings
from pathlib import Path

from trust import DATA, HONEST, normalised, table_of

ATTACKS = 3


def drawn(number: int, names: list[str]) -> dict:
    """Draw a federation and its training; the same number gives the same one."""
    draw = random.Random(f"federation {number}")
    clients, priority = draw.choice(((8, 2), (10, 4), (20, 2), (20, 4), (20, 10), (40, 4), (40, 8)))
    partition = draw.choice(("iid", "dirichlet", "dirichlet", "shards", "sizes"))
    return {
        "data": draw.choice(names),
        "clients": clients,
        "priority": priority,
        "partition": partition,
        "alpha": draw.choice((0.1, 0.3, 0.5, 1.0)),
        "shards": draw.choice((2, 3, 4)),
        "samples": draw.choice((100, 240, 240, 500)),
        "hidden": draw.choice((None, None, 50)),
        "lr": draw.choice((0.05, 0.1)),
        "epochs": draw.choice((1, 3, 5)),
        "batch_size": draw.choice((20, 50)),
        "rounds": draw.choice((30, 40, 60)),
        "fraction": draw.choice((0.25, 0.5, 0.75)),
    }


def federation(what: dict, number: int):
    """Split one of the data sets as drawn."""
    from fedalign.data import images

    partition, samples = what["partition"], what["samples"]
    settings = {"partition": partition}
    if partition == "dirichlet":
        settings["alpha"] = what["alpha"]
    if partition == "shards":
        settings |= {"shards": what["shards"], "shard_size": samples // what["shards"]}
    if partition == "sizes":  # from a third of the samples to twice as many
        draw = random.Random(f"sizes {number}")
        settings["sizes"] = [int(samples * draw.uniform(0.33, 2.0)) for _ in range(what["clients"])]
    else:
        settings["samples"] = samples
    folder = {"folder": "emnist47-redrawn"} if what["data"] == "emnist" else {}
    kind = getattr(images, DATA[what["data"]][0])
    made = kind(clients=what["clients"], priority=what["priority"], **settings, **folder)
    return normalised(made.federation(number))


def stack(job: tuple[int, list[str], dict]) -> dict:
    """Run a drawn federation: ``priority``, ``auto`` and the verified rule, and the latter under attacks."""
    import torch

    import fedalign as fa
    from fedalign.attacks.settings import make_adversary, resolve_adversary
    from fedalign.simulation.api import simulate_many
    from fedalign.training.models import logistic, mlp

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    number, names, settings = job
    what = drawn(number, names)
    fed = federation(what, number)
    local = fa.LocalSGD(lr=what["lr"], epochs=what["epochs"], batch_size=what["batch_size"])
    inputs, classes = DATA[what["data"]][1:]

    def model():
        return mlp(inputs, [what["hidden"]], classes) if what["hidden"] else logistic(inputs, classes)

    tables = {HONEST: table_of(HONEST, "", 0)}
    tables |= {f"random-{i}": table_of(f"random-{i}", f"drawn {number}", number) for i in range(ATTACKS)}
    common = {"rounds": what["rounds"], "local": local, "seed": number, "measure_every": 100}
    specs = [
        fa.RunSpec(fed, rule=rule, **common) for rule in (fa.PriorityOnly(), fa.AutoAlign(), fa.Verified(**settings))
    ]
    for table in tables.values():
        hostile = make_adversary(resolve_adversary({**table, "fraction": what["fraction"]}))
        specs.append(fa.RunSpec(fed, rule=fa.Verified(**settings), adversary=hostile, **common))
    results = simulate_many(specs, model, device="cpu")
    curves = [
        [0.0] * 10 if one.error is not None else [100 * v for v in one.history.values("test_accuracy")[-10:]]
        for one in results
    ]
    runs = dict(zip(("priority", "auto", "none", *tables), curves, strict=True))
    return {"number": number, **what, "runs": runs, "tables": tables}


def gain(row: dict, run: str) -> float:
    """Return a run's points above ``priority``; a strike in the last rounds is judged by these."""
    last = min(10, row["tables"].get(run, {}).get("last") or 10)
    return statistics.mean(row["runs"][run][-last:]) - statistics.mean(row["runs"]["priority"][-last:])


def table(rows: list[dict]) -> None:
    """Print a line for each federation, and a summary."""
    found: list[tuple[float, float, float]] = []  # the hostile part, the gain under attack, that of the honest alone
    quiet: list[float] = []
    beside: list[float] = []  # the verified rule less ``auto``, both without attack
    for row in rows:
        attacks = {run: gain(row, run) for run in row["runs"] if run.startswith("random")}
        honest, none = gain(row, HONEST), gain(row, "none")
        found += [(row["fraction"], value, honest) for value in attacks.values()]
        quiet.append(none)
        beside.append(none - gain(row, "auto"))
        split = {"dirichlet": f"dirichlet({row['alpha']})", "shards": f"{row['shards']} shards"}
        worst = min(attacks, key=attacks.__getitem__)
        shown = ", ".join(f"{value:+.1f}" for value in attacks.values())
        name = split.get(row["partition"], row["partition"])
        print(
            f"{row['number']}: {row['data']}, {name}, {row['priority']} of {row['clients']}, {row['samples']} samples, "
            f"{'network' if row['hidden'] else 'logistic'}, {row['epochs']} epochs, {row['rounds']} rounds: "
            f"priority {statistics.mean(row['runs']['priority']):.1f}; no attack {none:+.1f}, "
            f"auto {gain(row, 'auto'):+.1f}; "
            f"{row['fraction']:.0%} hostile {shown} of {honest:+.1f}; worst {json.dumps(row['tables'][worst])}"
        )
    print(
        f"\nwithout attack: mean {statistics.mean(quiet):+.1f}, worst {min(quiet):+.1f}, of {len(quiet)} federations; "
        f"less auto: mean {statistics.mean(beside):+.1f}, worst {min(beside):+.1f}, "
        f"{sum(one < -0.5 for one in beside)} more than half a point behind it"
    )
    for part in sorted({part for part, _, _ in found}):
        values = [value for of, value, _ in found if of == part]
        honest = statistics.mean(alone for of, _, alone in found if of == part)
        print(
            f"{part:.0%} hostile: mean {statistics.mean(values):+.2f} of {honest:+.2f}, worst {min(values):+.1f}; "
            f"{sum(v < -1 for v in values)} of {len(values)} runs more than 1 point behind, "
            f"{sum(v < -2 for v in values)} more than 2"
        )


def main() -> None:
    """Run all federations, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=60, help="how many federations")
    parser.add_argument("--first", type=int, default=0, help="the number of the first one")
    parser.add_argument("--data", default=",".join(DATA), help="the data sets to draw from")
    parser.add_argument("--set", action="append", default=[], help="an option of the rule, such as calibrated=false")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--out", type=Path, help="a file for all results, a line each; what it has is not run again")
    options = parser.parse_args()
    before = options.out.read_text(encoding="utf-8").splitlines() if options.out and options.out.exists() else []
    rows: list[dict] = [json.loads(line) for line in before]
    settings = {key: json.loads(value) for key, _, value in (one.partition("=") for one in options.set)}
    done, names = {row["number"] for row in rows}, options.data.split(",")
    numbers = range(options.first, options.first + options.count)
    waiting = [(number, names, settings) for number in numbers if number not in done]
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        for i, row in enumerate(pool.imap_unordered(stack, waiting), 1):
            rows.append(row)
            if options.out:
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
            print(f"{i} of {len(waiting)} federations", file=sys.stderr, flush=True)
    table(sorted(rows, key=lambda row: row["number"]))


if __name__ == "__main__":
    main()
