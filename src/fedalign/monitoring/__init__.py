"""What the operator of a federation over Flower sees: its status, as text, as a page and for Prometheus; its audit log.

Everything here reads a run's folder and writes nothing, and needs no Flower. The server writes ``status.json``
(``fedalign.flower.server_status``).
"""
