"""The paper's theory, made runnable: constants, bounds, the exact expected error of quadratics, advice on ε.

Statements, corrections and checks are in docs/theory.md.
"""

from fedalign.theory.bounds import Bounds, bounds, path_of
from fedalign.theory.constants import Constants, constants
from fedalign.theory.exact import Expected, expected
from fedalign.theory.problem import LeastSquares, Objective, Problem, Softmax

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
