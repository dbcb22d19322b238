"""Batched engine against the reference loop: the same as `fedalign bench`.

python benchmarks/engine.py                  # all cases, about three minutes on 2 cores
python benchmarks/engine.py logistic network # some of them
"""

import sys

from fedalign.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
