"""A federation on many machines, over Flower: the apps for ``flwr run``, the roster, and each client's own policy.

The algorithm is ``fedalign.protocol``; this package carries its requests over Flower's Grid. It needs the extra
``fedalign[flower]``.
"""

from fedalign.errors import FedalignError

try:
    import flwr as _flwr  # noqa: F401
except ImportError as error:  # pragma: no cover
    raise FedalignError("Flower is not installed: pip install 'fedalign[flower]'") from error

from fedalign.flower.node import ClientData

__all__ = ["ClientData"]
