"""The ``fedalign`` command, a module for each of its words; ``command_line`` puts them together.

Heavy imports are inside functions, so that a misspelt command is answered at once.
"""

from fedalign.cli.command_line import main

__all__ = ["main"]
