"""What depends on what the paper leaves open: its experiments again, with other readings of the same text.

    python benchmarks/readings.py run [EXPERIMENT …] [--readings A,B] [--seeds N] [--rounds N] [--save DIR]
    python benchmarks/readings.py table [EXPERIMENT …]        # of finished runs, nothing is run

Runs go into runs/readings/READING/NAME. They may be interrupted and started again: finished runs are kept. With
``--save docs/results/readings`` the figures are written for the results page.
"""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

import fedalign as fa
from fedalign.paper.compact import compact, read_all
from fedalign.paper.readings import ARMS, READINGS, readings_section
from fedalign.report.read_runs import read_run

EXPERIMENTS = ("synth-low", "synth-medium", "synth-high", "fmnist")


def settings_of(reading: str, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of a reading, and those of the command line."""
    settings: dict[str, Any] = {**READINGS[reading].settings}
    settings |= {f"arm.{arm}": dict(table) for arm, table in ARMS.items() if arm in options.arms and table}
    if options.emnist and "emnist" in name:
        settings["data.folder"] = options.emnist
    return settings


def run(reading: str, name: str, options: argparse.Namespace) -> None:
    """Run an experiment as a reading has it, or the rest of it."""
    settings = settings_of(reading, name, options) | {"arms": options.arms}
    for key in ("seeds", "rounds"):
        if getattr(options, key) is not None:
            settings[key] = getattr(options, key)
    out = options.out / reading / name
    print(fa.run(fa.experiment(name, settings), out, resume="auto", device=options.device, report=False))


def results(reading: str, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Give what the results page has of an experiment."""
    found = compact(read_run(options.out / reading / name))
    arms = {arm: {k: v for k, v in figures.items() if k != "curves"} for arm, figures in found.pop("arms").items()}
    return {**found, "reading": reading, "command": command_of(reading, name, options), "arms": arms}


def command_of(reading: str, name: str, options: argparse.Namespace) -> str:
    """Write the command that makes the figures of an experiment; it needs this package alone."""
    words = ["fedalign", "run", name, "--arms", ",".join(options.arms)]
    for key in ("seeds", "rounds"):
        if getattr(options, key) is not None:
            words += [f"--{key}", str(getattr(options, key))]
    for key, value in settings_of(reading, name, options).items():
        words += ["--set", shlex.quote(f"{key}={_toml(Path(value).name if key == 'data.folder' else value)}")]
    return " ".join(words)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {json.dumps(one)}" for key, one in value.items()) + "}"
    return value if isinstance(value, str) else json.dumps(value)


def main() -> None:
    """Run experiments, or write the section of those that have finished."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "table"])
    parser.add_argument("experiments", nargs="*", metavar="EXPERIMENT", default=list(EXPERIMENTS))
    parser.add_argument("--readings", type=lambda text: text.split(","), default=list(READINGS))
    parser.add_argument("--arms", type=lambda text: text.split(","), default=list(ARMS))
    parser.add_argument("--seeds", type=int)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--emnist", default="", metavar="FOLDER", help="files of your own in place of EMNIST's")
    parser.add_argument("--out", type=Path, default=Path("runs/readings"))
    parser.add_argument("--save", type=Path, metavar="DIR", help="write the figures for the results page there")
    options = parser.parse_intermixed_args()
    wanted = [
        (reading, name)
        for name in options.experiments or EXPERIMENTS
        for reading in options.readings
        if READINGS[reading].fits(name)
    ]
    for reading, name in wanted if options.what == "run" else ():
        run(reading, name, options)
    there = [one for one in wanted if (options.out / one[0] / one[1] / "summary.json").exists()]
    found = [results(reading, name, options) for reading, name in there]
    print(readings_section(found, read_all(Path("docs/results"))))
    for one in found if options.save else ():
        options.save.mkdir(parents=True, exist_ok=True)
        path = options.save / f"{one['experiment']}.{one['reading']}.json"
        path.write_text(json.dumps(one, indent=1, allow_nan=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
