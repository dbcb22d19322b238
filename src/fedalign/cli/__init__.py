"""The ``fedalign`` command: a module for each subcommand, assembled in ``command_line``.

Heavy imports are inside functions, so that ``--help`` and misspelt commands are answered at once.
"""

from fedalign.cli.command_line import main

__all__ = ["main"]
