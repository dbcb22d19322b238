"""The commands of ``fedalign``, a module each; ``fedalign.cli`` puts them together.

Heavy imports are inside functions, so that a wrong word is answered at once.
"""
