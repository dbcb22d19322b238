"""Every rule on every experiment: runs them, keeps compact summaries, and writes the table of docs/rules.md.

    python benchmarks/rules.py run [EXPERIMENT …] [--device cuda] [--tf32] [--emnist FOLDER] [--rounds N] [--seeds N]
    python benchmarks/rules.py table          # from docs/results/rules/*.json into docs/rules.md, nothing is run

Runs go into runs/rules/NAME and may be broken off and repeated: what is done is kept.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedalign.paper.compact import compact, read_all, save
from fedalign.paper.verdicts import rounds_to_priority
from fedalign.report.load import read_run

ROOT = Path(__file__).resolve().parent.parent
SUMMARIES, PAGE = ROOT / "docs" / "results" / "rules", ROOT / "docs" / "rules.md"
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
)


def run(options: argparse.Namespace) -> None:
    for name in options.experiments or EXPERIMENTS:
        folder = ROOT / "runs" / "rules" / name
        if not (folder / "summary.json").is_file():
            command = [
                sys.executable,
                "-m",
                "fedalign.cli",
                "run",
                name,
                "--arms",
                ",".join(ARMS),
                "--out",
                str(folder),
            ]
            for flag in ("device", "rounds", "seeds"):
                if getattr(options, flag) is not None:
                    command += [f"--{flag}", str(getattr(options, flag))]
            command += ["--tf32"] if options.tf32 else []
            command += ["--set", f"data.folder={options.emnist}"] if options.emnist and "emnist" in name else []
            command += ["--resume"] if (folder / "config.toml").is_file() else []
            subprocess.run(command, check=True)
        print(save(compact(read_run(folder)), SUMMARIES))


def accuracy(results: Mapping[str, Any], arm: str) -> str:
    figures = results["arms"].get(arm)
    if figures is None or figures["test_accuracy"]["mean"] is None:
        return "–"
    best = max(f["test_accuracy"]["mean"] or 0.0 for f in results["arms"].values())
    text = f"{100 * figures['test_accuracy']['mean']:.1f} ± {100 * figures['test_accuracy']['std']:.1f}"
    return f"**{text}**" if figures["test_accuracy"]["mean"] >= best - 0.005 else text


def rounds(results: Mapping[str, Any], arm: str) -> str:
    figures = results["arms"].get(arm)
    return "–" if figures is None else rounds_to_priority(figures, len(results["seeds"]))


def cost(results: Mapping[str, Any], arm: str) -> str:
    figures = results["arms"].get(arm)
    return "–" if figures is None else f"{(figures['models_up'] + figures['models_down']) / 1000:.1f}"


def one_table(results: Mapping[str, Mapping[str, Any]], cell: Callable[[Mapping[str, Any], str], str]) -> str:
    names = [name for name in EXPERIMENTS if name in results]
    lines = ["| arm | " + " | ".join(f"`{name}`" for name in names) + " |", "|---" * (len(names) + 1) + "|"]
    lines += [f"| `{arm}` | " + " | ".join(cell(results[name], arm) for name in names) + " |" for arm in ARMS]
    return "\n".join(lines)


def table(options: argparse.Namespace) -> None:
    results = read_all(SUMMARIES)
    missing = [name for name in EXPERIMENTS if name not in results]
    parts = [
        "Final test accuracy of the priority clients in %, mean ± standard deviation over seeds; bold: within half a "
        "point of the best.\n",
        one_table(results, accuracy),
        "\nRounds until the accuracy (a mean over five rounds) reaches the final accuracy of `priority`; in how many "
        "seeds.\n",
        one_table(results, rounds),
        "\nThousands of models sent, up and down, in a run.\n",
        one_table(results, cost),
    ]
    if missing:
        parts.append(f"\nNot run yet: {', '.join(f'`{name}`' for name in missing)}.")
    text = PAGE.read_text(encoding="utf-8")
    new = re.sub(
        r"(<!-- table -->\n).*?(<!-- end of table -->)",
        lambda m: m[1] + "\n".join(parts) + "\n" + m[2],
        text,
        flags=re.S,
    )
    PAGE.write_text(new, encoding="utf-8")
    print(PAGE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("run")
    command.add_argument("experiments", nargs="*")
    for flag, kind in (("--device", str), ("--emnist", str), ("--rounds", int), ("--seeds", int)):
        command.add_argument(flag, type=kind)
    command.add_argument("--tf32", action="store_true")
    command.set_defaults(do=run)
    commands.add_parser("table").set_defaults(do=table)
    options = parser.parse_args()
    options.do(options)


if __name__ == "__main__":
    main()
