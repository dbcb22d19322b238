"""How updates become one model: checks and steps on every update, and the aggregators that combine them."""
