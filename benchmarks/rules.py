"""Every rule on every experiment: runs them, keeps compact summaries, and writes the table of docs/rules.md.

    python benchmarks/rules.py run [EXPERIMENT …] [--arms A,B] [--device cuda] [--tf32] [--emnist FOLDER] …
    python benchmarks/rules.py optimisers [EXPERIMENT …]      # SCAFFOLD and server optimisers, on Synth
    python benchmarks/rules.py join RUN …                     # more arms, or an arm's newer run, into the summaries
    python benchmarks/rules.py table          # from docs/results/rules into docs/rules.md, nothing is run

Runs go into runs/rules/NAME. They may be interrupted and started again: finished runs are kept.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedalign.paper.compact import compact, read_all, save
from fedalign.paper.verdicts import rounds_to_priority
from fedalign.report.read_runs import read_run
from fedalign.report.table import spread

ROOT = Path(__file__).resolve().parent.parent
SUMMARIES, PAGE = ROOT / "docs" / "results" / "rules", ROOT / "docs" / "rules.md"
OPTIMISED = SUMMARIES / "optimisers"
ARMS = ("priority", "all", "fedalign", "auto", "gradient", "trust", "choice", "weighted")
EXPERIMENTS = (
    "synth-low",
    "synth-medium",
    "synth-high",
    "fmnist",
    "various-fmnist-6",
    "emnist",
    "various-emnist-9",
    "various-emnist-18",
    "cifar10",
    "prox-fmnist",
    "prox-emnist",
    "partial-fmnist",
    "partial-emnist",
    "partial-cifar10",
    "local-fmnist",
    "local-emnist",
    "local-cifar10",
)


SYNTH = EXPERIMENTS[:3]
#: How clients work, or what the server does with the mean, beside plain SGD and FedAvg: the settings.
OPTIMISERS = {
    "FedAvg": [],
    "SCAFFOLD": ["local.scaffold=true"],
    "FedAvgM": ["server.kind=fedavgm"],
    "FedAdam": ["server.kind=fedadam", "server.lr=0.1"],
    "FedYogi": ["server.kind=fedyogi", "server.lr=0.1"],
}
OPTIMISED_ARMS = ("priority", "all", "fedalign", "auto")


def fedalign_run(name: str, folder: Path, arms: Sequence[str], options: argparse.Namespace, *settings: str) -> None:
    """Run an experiment, or continue it, unless it is finished."""
    if (folder / "summary.json").is_file():
        return
    command = [
        sys.executable,
        "-m",
        "fedalign",
        "run",
        name,
        "--arms",
        ",".join(arms),
        "--out",
        str(folder),
    ]
    for flag in ("device", "rounds", "seeds"):
        if getattr(options, flag) is not None:
            command += [f"--{flag}", str(getattr(options, flag))]
    command += ["--tf32"] if options.tf32 else []
    command += ["--set", f"data.folder={options.emnist}"] if options.emnist and "emnist" in name else []
    for setting in settings:
        command += ["--set", setting]
    command += ["--resume"] if (folder / "config.toml").is_file() else []
    subprocess.run(command, check=True)


def run(options: argparse.Namespace) -> None:
    for name in options.experiments or EXPERIMENTS:
        folder = ROOT / "runs" / "rules" / name
        fedalign_run(name, folder, options.arms.split(",") if options.arms else ARMS, options)
        print(save(compact(read_run(folder)), SUMMARIES))


def optimisers(options: argparse.Namespace) -> None:
    for name in options.experiments or SYNTH:
        for label, settings in OPTIMISERS.items():
            folder = ROOT / "runs" / "optimisers" / f"{name}-{label}"
            # SCAFFOLD must know whose update counts before clients train, so it doesn't go with AutoALIGN.
            arms = [arm for arm in OPTIMISED_ARMS if not (arm == "auto" and label == "SCAFFOLD")]
            fedalign_run(name, folder, arms, options, *settings)
            results = compact(read_run(folder))
            for figures in results["arms"].values():
                del figures["curves"]
            print(save({**results, "experiment": f"{name}-{label}"}, OPTIMISED))


def join(options: argparse.Namespace) -> None:
    """Put the arms of runs into the experiments' summaries; the first run of an experiment begins its summary."""
    for folder in options.folders:
        run = read_run(folder)
        path = SUMMARIES / f"{run.summary['experiment']}.json"
        if not path.is_file():
            print(save(compact(run), SUMMARIES))
            continue
        kept = json.loads(path.read_text(encoding="utf-8"))
        for key in ("rounds", "seeds"):
            if run.summary[key] != kept[key]:
                sys.exit(f"{folder} differs from {path} in {key}: {run.summary[key]} and {kept[key]}")
        more = compact(run, kept["arms"])
        commands = [*kept["command"].split("; "), more["command"]]
        arms = kept["arms"] | more["arms"]
        ordered = {arm: arms[arm] for arm in (*ARMS, *arms) if arm in arms}
        print(save({**kept, "command": "; ".join(dict.fromkeys(commands)), "arms": ordered}, SUMMARIES))


def accuracy(results: Mapping[str, Any], arm: str) -> str:
    figures = results["arms"].get(arm)
    if figures is None or figures["test_accuracy"]["mean"] is None:
        return "–"
    best = max(results["arms"][one]["test_accuracy"]["mean"] or 0.0 for one in ARMS if one in results["arms"])
    text = spread(figures["test_accuracy"], 100, 1)
    return f"**{text}**" if figures["test_accuracy"]["mean"] >= best - 0.005 else text


def rounds(results: Mapping[str, Any], arm: str) -> str:
    figures = results["arms"].get(arm)
    return "–" if figures is None else rounds_to_priority(figures, len(results["seeds"]))


def cost(results: Mapping[str, Any], arm: str) -> str:
    figures = results["arms"].get(arm)
    return "–" if figures is None else f"{(figures['models_up'] + figures['models_down']) / 1000:.1f}"


def one_table(results: Mapping[str, Mapping[str, Any]], cell: Callable[[Mapping[str, Any], str], str]) -> str:
    names = [name for name in EXPERIMENTS if name in results]
    rows = [[f"`{name}`", *(cell(results[name], arm) for arm in ARMS)] for name in names]
    return grid(["experiment", *(f"`{arm}`" for arm in ARMS)], rows)


def optimiser_table(results: Mapping[str, Mapping[str, Any]]) -> str:
    rows = []
    for label in OPTIMISERS:
        for arm in OPTIMISED_ARMS:
            cells = [accuracy(results[f"{name}-{label}"], arm) for name in SYNTH if f"{name}-{label}" in results]
            if any(cell != "–" for cell in cells):
                rows.append([label, f"`{arm}`", *cells])
    return grid(["optimiser", "arm", *(f"`{name}`" for name in SYNTH)], rows)


def grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def table(options: argparse.Namespace) -> None:
    results = read_all(SUMMARIES)
    missing = [name for name in EXPERIMENTS if name not in results]
    parts = [
        "Final test accuracy of the priority clients in %, mean ± standard deviation over seeds. Bold: within half a "
        "point of the best.\n",
        one_table(results, accuracy),
        "\nRounds until the accuracy (a mean over five rounds) reaches the final accuracy of `priority`. In brackets: "
        "in how many seeds it does.\n",
        one_table(results, rounds),
        "\nThousands of models sent in a run, to clients and by clients.\n",
        one_table(results, cost),
    ]
    if OPTIMISED.is_dir():
        parts += [
            "\nSCAFFOLD at the clients, or another server optimiser, with its settings in `benchmarks/rules.py` "
            "(`python benchmarks/rules.py optimisers`). Final test accuracy in %. Bold: within half a point of the "
            "optimiser's best.\n",
            optimiser_table(read_all(OPTIMISED)),
        ]
    if missing:
        parts.append(f"\nNot run yet: {', '.join(f'`{name}`' for name in missing)}.")
    into_page(PAGE, "table", "\n".join(parts))


def into_page(page: Path, mark: str, content: str) -> None:
    """Replace what stands between two marks of a page."""
    text = page.read_text(encoding="utf-8")
    between = rf"(<!-- {mark} -->\n).*?(<!-- end of {mark} -->)"
    page.write_text(re.sub(between, lambda m: f"{m[1]}{content}\n{m[2]}", text, flags=re.S), encoding="utf-8")
    print(page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for do in (run, optimisers):
        command = commands.add_parser(do.__name__)
        command.add_argument("experiments", nargs="*")
        for flag, kind in (("--device", str), ("--emnist", str), ("--rounds", int), ("--seeds", int)):
            command.add_argument(flag, type=kind)
        if do is run:
            command.add_argument("--arms")
        command.add_argument("--tf32", action="store_true")
        command.set_defaults(do=do)
    command = commands.add_parser("join")
    command.add_argument("folders", nargs="+", type=Path)
    command.set_defaults(do=join)
    commands.add_parser("table").set_defaults(do=table)
    options = parser.parse_args()
    options.do(options)


if __name__ == "__main__":
    main()
