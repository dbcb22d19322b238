"""SCAFFOLD's control variates (Karimireddy et al., 2020, arXiv:1910.06378), held for all clients of a run.

``c_k`` estimates client k's gradient and ``c`` the aggregate's; a local step adds ``c − c_k``, so that clients with
unlike data step alike. In a federation of many machines ``c_k`` lives on the client; here there is a row for each.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fedalign.simulation.engine.layout import Layout

_SERVER, _CLIENTS = "scaffold.server", "scaffold.clients"


class Controls:
    """A run's control variates, zero at first; ``tensors`` are those of a snapshot to go on from."""

    def __init__(
        self, clients: int, layout: Layout, device: torch.device, tensors: Mapping[str, torch.Tensor] | None = None
    ) -> None:
        size = layout.trainable_size
        if tensors is not None and _SERVER in tensors:
            self.server, self.clients = (tensors[name].to(device, copy=True) for name in (_SERVER, _CLIENTS))
        else:
            self.server = torch.zeros(size, dtype=layout.dtype, device=device)
            self.clients = torch.zeros((clients, size), dtype=layout.dtype, device=device)
        self._size = size
        self._change = torch.zeros_like(self.server)

    def correction(self, k: int) -> torch.Tensor:
        """Return ``c − c_k``, which every local step of client k adds to its gradient."""
        return self.server - self.clients[k]

    def update(self, k: int, moved: torch.Tensor, rates: float, share: float) -> None:
        """Renew client k's variate: ``c_k − c + (w − w_k)/Ση``, with ``moved = w − w_k``; remember ``share·Δc_k``."""
        change = moved[: self._size] / rates - self.server
        self.clients[k] += change
        self._change.add_(change, alpha=share)

    def renew(
        self,
        received: torch.Tensor,
        trained: Mapping[int, torch.Tensor],
        shares: Mapping[int, float],
        rates: Mapping[int, float],
        part: float,
    ) -> None:
        """Renew the variates of the clients that trained ``received`` to a model each, and then the server's.

        ``shares`` are those of the aggregate, ``rates`` the sums of the learning rates over a client's local steps,
        and ``part`` is the weight of the priority clients that took part.
        """
        for k, model in trained.items():
            self.update(k, received - model, rates[k], shares.get(k, 0.0))
        self.close(part)

    def grow(self, clients: int) -> None:
        """Add zero variates, so that there are at least so many clients."""
        missing = clients - len(self.clients)
        if missing > 0:
            self.clients = torch.cat([self.clients, self.clients.new_zeros(missing, self._size)])

    def close(self, part: float) -> None:
        """End a round: ``c ← c + part·Σ share_k·Δc_k``."""
        self.server += self._change * part
        self._change.zero_()

    def named(self) -> dict[str, torch.Tensor]:
        """Return copies of all variates by name, for a snapshot."""
        return {_SERVER: self.server.clone(), _CLIENTS: self.clients.clone()}
