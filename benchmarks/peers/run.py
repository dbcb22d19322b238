"""All peers on the same work, in one run, each in its own virtual environment.

    python benchmarks/peers/run.py                       # sets up .peers/ (some 3 GB), then about fifteen minutes
    python benchmarks/peers/run.py --cases logistic --peers ours,loop,fedjax

Peers take turns, one process at a time. Prints a table per case and writes the figures to `.peers/results.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import threading
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
HOME = ROOT / ".peers"
PEERS = {  # script, packages of its own environment (None: this one), cases it can do
    "ours": ("ours.py", None, ("logistic", "network", "cnn")),
    "loop": ("loop.py", None, ("logistic", "network", "cnn")),
    "fedjax": ("fedjax_peer.py", ["fedjax==0.0.17", "jax", "jaxlib"], ("logistic", "network")),
    "pfl": ("pfl_peer.py", ["torch==2.13.0", "pfl==0.6.0"], ("logistic", "network", "cnn")),
    "flower": ("flower_peer.py", ["torch==2.13.0", "flwr[simulation]==1.41.0"], ("logistic", "network", "cnn")),
}
ROUNDS = {"logistic": 5, "network": 5, "cnn": 4}


def python_of(peer: str) -> str:
    """Give the interpreter of a peer's environment, made on first use."""
    packages = PEERS[peer][1]
    if packages is None:
        return sys.executable
    folder = HOME / peer
    if not (folder / ".installed").exists():
        print(f"setting up {folder} …", flush=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        subprocess.run([folder / "bin" / "pip", "install", "--quiet", *packages], check=True)
        (folder / ".installed").touch()
    return str(folder / "bin" / "python")


def memory_mb(root: int) -> float:
    """Add up the resident memory of a process and all that it started (shared pages count in each)."""
    parents: dict[int, list[int]] = {}
    pages: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it ended while we looked
        parents.setdefault(int(fields[1]), []).append(int(entry.name))
        pages[int(entry.name)] = int(fields[21])
    total, todo = 0, [root]
    while todo:
        one = todo.pop()
        total += pages.get(one, 0)
        todo += parents.get(one, [])
    return total * os.sysconf("SC_PAGE_SIZE") / 2**20


def measure(peer: str, case: str) -> dict[str, object]:
    command = [python_of(peer), PEERS[peer][0], case, str(ROUNDS[case])]
    process = subprocess.Popen(command, cwd=HERE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    peak = [0.0]

    def watch() -> None:
        while process.poll() is None:
            peak[0] = max(peak[0], memory_mb(process.pid))
            time.sleep(0.5)

    threading.Thread(target=watch, daemon=True).start()
    output, _ = process.communicate(timeout=1800)
    lines = [line for line in output.splitlines() if "RESULT " in line]
    if not lines:
        return {"peer": peer, "error": "\n".join(output.strip().splitlines()[-3:])}
    return {**json.loads(lines[-1].partition("RESULT ")[2]), "peak_mb": peak[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="logistic,network,cnn")
    parser.add_argument("--peers", default=",".join(PEERS))
    options = parser.parse_args()
    peers = options.peers.split(",")
    for peer in peers:
        python_of(peer)
    found: dict[str, list[dict[str, object]]] = {}
    for case in options.cases.split(","):
        for peer in peers:
            if case in PEERS[peer][2]:
                print(f"{case}: {peer} …", flush=True)
                found.setdefault(case, []).append(measure(peer, case))
    machine = (
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    )
    HOME.mkdir(exist_ok=True)
    (HOME / "results.json").write_text(json.dumps({"machine": machine, "cases": found}, indent=1) + "\n")
    for case, rows in found.items():
        ours = next((r["round"] for r in rows if r["peer"] == "FedALIGN"), None)
        print(f"\n{case}, {ROUNDS[case]} rounds ({machine})\n")
        print("| | s a round | ours is faster by | first round | start-up | peak memory | accuracy |")
        print("|---|---|---|---|---|---|---|")
        for r in rows:
            if "error" in r:
                print(f"| {r['peer']} | failed: {r['error']} |")
                continue
            ratio = f"{r['round'] / ours:.2f}×" if ours else "–"
            print(
                f"| {r['peer']} {r['version']} | {r['round']:.3f} | {ratio} | {r['first']:.2f} s | {r['start']:.1f} s "
                f"| {r['peak_mb']:.0f} MB | {100 * r['accuracy']:.1f} % |"
            )


if __name__ == "__main__":
    main()
