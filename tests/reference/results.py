"""Records what runs of the reference set produce, to the bit, and compares it with an earlier record.

    python tests/reference/results.py record FILE.json [--only NAME …] [--keep FOLDER]
    python tests/reference/results.py check  FILE.json … [--only NAME …] [--keep FOLDER]

The commands of the set are run with the ``fedalign`` that this Python imports, so the same script records an earlier
version: ``PYTHONPATH=old/src python tests/reference/results.py record old.json``. A record holds, for every run, a
hash of its decisions and one of all its values and final weights. Values are equal to the bit only on one kind of
processor with one version of PyTorch, so the record names both by a fingerprint of their arithmetic. There is a record
for each kind of processor that we had.

On other machines the figures of the first rounds are compared, nearly. Later ones say nothing: training magnifies the
difference of a last digit to 0.2 % of the loss in three rounds, and to 29 % in four.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

import fedalign

ALL = "priority,all,local,fedalign,auto,gradient,trust,choice,weighted"
FEW = "priority,all,fedalign,auto,trust"
NO_UPDATES = "priority,all,local,fedalign,choice,weighted"
#: AutoALIGN's fallback; version 0.1 has no such option, and no other one.
AS_IN_0_1 = () if fedalign.__version__ == "0.1.0" else ("--set", "arm.auto.credit=true")
EARLY = 3  # rounds whose figures are nearly the same on all machines


def commands(folder: Path) -> dict[str, list[str]]:
    """The reference set: what follows ``fedalign run``."""
    trace = folder / "trace.csv"
    rows = [f"{t},{k}" for t in range(8) for k in range(20) if (3 * t + 7 * k) % 5 and not (t == 5 and k < 10)]
    trace.write_text("round,client\n" + "\n".join(rows) + "\n")
    short = ["--seeds", "2", "--rounds", "20"]
    found = {
        "synth-low": ["synth-low", "--arms", ALL, "--seeds", "2", "--rounds", "60"],
        "synth-high": ["synth-high", "--arms", ALL, "--seeds", "2", "--rounds", "60"],
        "uniform": ["synth-low", "--arms", FEW, *short, "--set", "participation.kind=uniform",
                    "--set", "participation.fraction=0.4"],
        "replacement": ["synth-low", "--arms", FEW, *short, "--set", "participation.kind=replacement",
                        "--set", "participation.draws=6"],
        "bernoulli": ["synth-low", "--arms", FEW, *short, "--set", "participation.kind=bernoulli",
                      "--set", "participation.p=0.5"],
        "trace": ["synth-low", "--arms", FEW, *short, "--set", "participation.kind=trace",
                  "--set", f"participation.path={trace}", "--set", "participation.repeat=true"],
        "scaffold": ["synth-low", "--arms", NO_UPDATES, *short, "--set", "local.scaffold=true"],
        "scaffold-uniform": ["synth-low", "--arms", "priority,all,fedalign", *short, "--set", "local.scaffold=true",
                             "--set", "participation.kind=uniform", "--set", "participation.fraction=0.4",
                             "--set", "server.kind=fedavgm"],
        "fedavgm": ["synth-low", "--arms", FEW, *short, "--set", "server.kind=fedavgm"],
        "fedadam": ["synth-low", "--arms", FEW, *short, "--set", "server.kind=fedadam"],
        "fedyogi": ["synth-high", "--arms", FEW, *short, "--set", "server.kind=fedyogi"],
        "fedprox": ["synth-low", "--arms", FEW, *short, "--set", "local.mu=1.0"],
        "momentum": ["synth-low", "--arms", FEW, *short, "--set", "local.momentum=0.9", "--set", "local.clip=1.0",
                     "--set", "local.weight_decay=0.001"],
        "accuracy": ["synth-low", "--arms", "fedalign,auto", *short, "--set", "match=accuracy"],
        "ladder": ["synth-low", "--arms", "auto", *short, "--set", "arm.auto.ladder=[0.0,0.1,0.4]",
                   "--set", "warmup=3"],
        "no-fallback": ["synth-high", "--arms", "auto", *short, "--set", "arm.auto.fallback=false",
                        "--set", "arm.auto.cosine=false"],
        "theory-quadratic": ["theory-quadratic", "--seeds", "2"],
        "fmnist": ["fmnist", "--arms", "priority,all,local,fedalign,auto", "--seeds", "1", "--rounds", "10"],
    }  # fmt: skip
    return {name: [*arguments, *(AS_IN_0_1 if "auto" in _arms(arguments) else ())] for name, arguments in found.items()}


def _arms(arguments: list[str]) -> list[str]:
    return arguments[arguments.index("--arms") + 1].split(",") if "--arms" in arguments else []


def fingerprint() -> str:
    """Hash the results of some float32 arithmetic: equal on machines that round alike."""
    x = torch.linspace(-3, 3, 64 * 60).view(2, 32, 60)
    w = torch.linspace(1, -1, 60 * 10).view(1, 60, 10).expand(2, -1, -1).contiguous()
    y = torch.bmm(x, w)
    wide = torch.linspace(-1, 1, 50 * 784).view(1, 50, 784).expand(2, -1, -1).contiguous()
    narrow = torch.linspace(1, -1, 784 * 10).view(1, 784, 10).expand(2, -1, -1).contiguous()
    parts = [y, y.exp(), torch.log_softmax(y, -1), y.tanh(), torch.bmm(wide, narrow), y.double().sum(1)]
    digest = hashlib.sha256(torch.__version__.split("+")[0].encode())
    for part in parts:
        digest.update(part.contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


def numpy_fingerprint() -> str:
    """Hash the results of some of NumPy's linear algebra, whose kernels are its own and are chosen by the processor."""
    x = np.sin(np.arange(40 * 5, dtype=np.float64)).reshape(40, 5)
    parts = [np.linalg.qr(x)[0], x.T @ x, np.linalg.solve(x.T @ x, x.sum(0))]
    return hashlib.sha256(b"".join(np.ascontiguousarray(part).tobytes() for part in parts)).hexdigest()[:16]


def rounds_alike(record: dict[str, Any], name: str) -> bool:
    """Say whether this machine rounds as the record's did, in all that a name of the set needs."""
    drawn_by_numpy = name.startswith("theory-")
    same = record["fingerprint"] == fingerprint()
    return same and (not drawn_by_numpy or record["numpy_fingerprint"] == numpy_fingerprint())


def choose_record(records: list[dict[str, Any]], name: str) -> tuple[dict[str, Any], bool]:
    """Return the record to compare a name with, and whether to the bit; the last one has figures of early rounds."""
    alike = next((record for record in records if rounds_alike(record, name)), None)
    return (records[-1], False) if alike is None else (alike, True)


def run(arguments: list[str], out: Path) -> None:
    """Run ``fedalign run`` with these arguments into a folder."""
    code = "import sys; from fedalign.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "run", *arguments, "--device", "cpu", "--quiet", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONSAFEPATH": "1"})
    if done.returncode:
        raise SystemExit(f"fedalign run {' '.join(arguments)} failed:\n{done.stderr[-2000:]}")


def read(out: Path, keys: dict[str, list[str]] | None) -> dict[str, dict[str, Any]]:
    """Hash every run of a folder. ``keys`` are those of an earlier record: what has been added since is left out."""
    found = {}
    for log in sorted(out.glob("*/seed-*/rounds.jsonl")):
        rows = [json.loads(line) for line in log.read_text().splitlines()]
        decisions = [[c["decision"] for c in row["clients"]] for row in rows]
        kept = [{k: row[k] for k in (keys["round"] if keys else row)} for row in rows]
        for row in kept:
            row["clients"] = [{k: c[k] for k in (keys["client"] if keys else c)} for c in row["clients"]]
        weights = load_file(log.parent / "model.safetensors")
        digest = hashlib.sha256()
        for name in sorted(weights):
            digest.update(name.encode() + weights[name].contiguous().numpy().tobytes())
        found[f"{log.parent.parent.name}/{log.parent.name}"] = {
            "decisions": _hash(decisions),
            "values": _hash(kept),
            "weights": digest.hexdigest()[:24],
            "early": [_figures(row) for row in rows[:EARLY]],
            "figures": _figures(rows[-1]),
            "admitted": sum(d == "admitted" for row in decisions for d in row),
        }
    return found


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:24]


def _figures(row: dict[str, Any]) -> list[float | None]:
    return [_short(row[k]) for k in ("global_loss", "test_loss", "test_accuracy", "train_loss")]


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def keys_of(out: Path) -> dict[str, list[str]]:
    """The keys of a round and of a client, as they are written now."""
    row = json.loads(next(iter(sorted(out.glob("*/seed-*/rounds.jsonl")))).read_text().splitlines()[0])
    return {"round": sorted(row), "client": sorted(row["clients"][0])}


def differences(old: dict[str, Any], new: dict[str, Any], exact: bool) -> list[str]:
    """Say which runs differ; without ``exact``, in early rounds only, where other processors round nearly alike."""
    said = [f"{name} is missing" for name in old if name not in new]
    for name in old.keys() & new.keys():
        was, now = old[name], new[name]
        if exact:
            said += [f"{name}: {what} differ" for what in ("decisions", "values", "weights") if was[what] != now[what]]
        else:
            rounds = 1 if name.startswith("local/") else None  # a client that trains alone magnifies them at once
            both = zip(was["early"][:rounds], now["early"][:rounds], strict=True)
            near = all(_near(a, b) for rows in both for a, b in zip(*rows, strict=True))
            said += [] if near else [f"{name}: {was['early']} became {now['early']}"]
    return sorted(said)


def _near(a: float | None, b: float | None) -> bool:
    return a == b if a is None or b is None else math.isclose(a, b, rel_tol=0.05, abs_tol=0.02)


def main() -> int:
    """Record or check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["record", "check"])
    parser.add_argument("file", type=Path, nargs="+")
    parser.add_argument("--only", nargs="*", help="names of the set; without it, all")
    parser.add_argument("--keep", type=Path, help="keep the runs in this folder")
    options = parser.parse_args()
    records = [json.loads(file.read_text()) for file in options.file] if options.what == "check" else []
    new: dict[str, Any] = {"fingerprint": fingerprint(), "numpy_fingerprint": numpy_fingerprint(), "runs": {}}
    said: list[str] = []
    roughly: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        home = options.keep or Path(temporary)
        home.mkdir(parents=True, exist_ok=True)
        for name, arguments in commands(home).items():
            if options.only is not None and name not in options.only:
                continue
            run(arguments, home / name)
            if records:
                record, exact = choose_record(records, name)
                roughly += [] if exact else [name]
                found = differences(record["runs"][name], read(home / name, record["keys"]), exact)
                said += [f"{name}/{one}" for one in found]
                print(name, found or "equal", flush=True)
            else:
                new.setdefault("keys", keys_of(home / name))
                new["runs"][name] = read(home / name, None)
                print(name, "recorded", flush=True)
    if not records:
        options.file[0].write_text(json.dumps(new, indent=1) + "\n")
    elif roughly:
        print(f"this machine rounds otherwise than the records': early figures were compared, not bits: {roughly}")
    return 1 if said else 0


if __name__ == "__main__":
    raise SystemExit(main())
