"""SCAFFOLD's control variates (Karimireddy et al., 2020, arXiv:1910.06378), held for all clients of a run.

``c_k`` estimates client k's gradient and ``c`` the aggregate's; a local step adds ``c − c_k``, so that clients with
unlike data step alike. In a federation of many machines ``c_k`` lives at the client; here there is a row for each.
"""

from __future__ import annotations

import torch

from fedalign.simulation.engine.layout import Layout


class Controls:
    """A run's control variates, at first zero; ``rows`` are those that :meth:`rows` gave earlier."""

    def __init__(self, clients: int, layout: Layout, device: torch.device, rows: torch.Tensor | None = None) -> None:
        self._size, self._whole = layout.trainable_size, layout.size
        if rows is None:
            rows = torch.zeros((clients + 1, self._size), dtype=layout.dtype, device=device)
        self.server, self.clients = rows[0, : self._size].clone(), rows[1:, : self._size].clone()
        self._change = torch.zeros_like(self.server)

    def correction(self, k: int) -> torch.Tensor:
        """Give ``c − c_k``."""
        return self.server - self.clients[k]

    def update(self, k: int, moved: torch.Tensor, rates: float, share: float) -> None:
        """Renew client k's variate: ``c_k − c + (w − w_k)/Ση``, with ``moved = w − w_k``; remember ``share·Δc_k``."""
        change = moved[: self._size] / rates - self.server
        self.clients[k] += change
        self._change.add_(change, alpha=share)

    def close(self, part: float) -> None:
        """End a round: ``c ← c + part·Σ share_k·Δc_k``."""
        self.server += self._change * part
        self._change.zero_()

    def rows(self) -> tuple[torch.Tensor, ...]:
        """Give all variates, the server's first, padded to a model's length, to be stored beside the model."""
        padded = torch.zeros((len(self.clients) + 1, self._whole), dtype=self.server.dtype, device=self.server.device)
        padded[0, : self._size], padded[1:, : self._size] = self.server, self.clients
        return tuple(padded)
