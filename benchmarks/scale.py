"""Many small clients on one machine: one round of FedAvg on everybody, seconds and peak memory.

python benchmarks/scale.py            # 1,000 and 10,000 clients of 50 samples, 784×10, each in a process of its own
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time

import numpy as np


def one(clients: int) -> None:
    import fedalign as fa
    from fedalign.training import models

    draw = np.random.default_rng(0)
    x = draw.integers(0, 256, (clients * 50, 784), dtype=np.uint8)
    y = draw.integers(0, 10, clients * 50)
    parts = np.arange(clients * 50).reshape(clients, 50)
    fed = fa.Federation.from_partition((x, y), list(parts), priority=[k < 10 for k in range(clients)])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = []
    last = [time.perf_counter()]

    def tick(done: object) -> None:
        seconds.append(time.perf_counter() - last[0])
        last[0] = time.perf_counter()

    local = fa.LocalSGD(lr=0.1, epochs=5, batch_size=50)
    fa.simulate(fed, lambda: models.logistic(784, 10), fa.Everyone(), 3, 0, local, device="cpu", on_round=tick)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"{min(seconds[1:]):.3f} {peak / 1024:.0f} {(peak - before) / 1024:.0f} {x.nbytes / 2**20:.0f}")


def main() -> None:
    rows = {}
    for clients in (1_000, 10_000):
        out = subprocess.run(
            [sys.executable, __file__, str(clients)], capture_output=True, text=True, check=True
        ).stdout
        rows[clients] = [float(word) for word in out.split()]
        s, peak, more, data = rows[clients]
        print(
            f"{clients:,} clients: {s:.2f} s a round; peak {peak:.0f} MB, {more:.0f} MB for the run; data {data:.0f} MB"
        )
    print(f"ratio of time: {rows[10_000][0] / rows[1_000][0]:.1f}×")


if __name__ == "__main__":
    one(int(sys.argv[1])) if len(sys.argv) > 1 else main()
