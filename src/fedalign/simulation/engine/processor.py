"""What the batched engine needs to know about and do with a CPU: its cache's size, and work in threads."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch

Done = TypeVar("Done")


@functools.cache
def last_level_cache() -> int:
    """Give the size in bytes of this machine's last-level cache, at most 128 MiB; 16 MiB where it can't be read."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        if text.endswith("K") and text[:-1].isdecimal():
            sizes.append(int(text[:-1]) << 10)
    return min(max(sizes, default=16 << 20), 128 << 20)


def in_threads(work: Callable[[list[int]], Done], chunks: Sequence[list[int]], threads: int) -> Iterator[Done]:
    """Call ``work`` on every chunk, in threads that use one core each; yield the results in the chunks' order.

    Only a few chunks are in progress at a time, so that few results wait in memory.
    """
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            in_progress: deque[Future[Done]] = deque()
            for chunk in chunks:
                in_progress.append(pool.submit(work, chunk))
                if len(in_progress) > 2 * threads:
                    yield in_progress.popleft().result()
            while in_progress:
                yield in_progress.popleft().result()
    finally:
        torch.set_num_threads(threads)
