"""The paper's theory as code: constants, bounds, the exact expected error of least squares, and advice on ε.

The statements, their corrections and how they were checked are in docs/theory.md.
"""

from fedalign.theory.bounds import Bounds, bounds, path_of
from fedalign.theory.constants import Constants, constants
from fedalign.theory.exact import Expected, expected
from fedalign.theory.objectives import LeastSquares, Objective, Softmax
from fedalign.theory.problem import Problem

__all__ = [
    "Bounds",
    "Constants",
    "Expected",
    "LeastSquares",
    "Objective",
    "Problem",
    "Softmax",
    "bounds",
    "constants",
    "expected",
    "path_of",
]
