"""Starts Flower's SuperNode with the owner's policy and shorter pauses.

``python -m fedalign.flower.supernode`` takes the options of ``flower-supernode``.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run ``flower-supernode`` in this process; ends with exit code 2 for a config or an environment that is wrong."""
    from flwr.supernode.cli import flower_supernode

    from fedalign.errors import FedalignError
    from fedalign.flower.gate import close_gate
    from fedalign.flower.node_config import node_config
    from fedalign.flower.policy import Policy
    from fedalign.flower.polling import quicken_pulls, quicken_supernode

    try:
        close_gate(Policy.read(node_config(sys.argv[1:])))
        quicken_supernode()
        quicken_pulls()
    except FedalignError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    sys.argv[0] = "flower-supernode"
    flower_supernode()


if __name__ == "__main__":
    main()
