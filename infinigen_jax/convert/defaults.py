"""Settings of a conversion that nobody gave."""

DEFAULT_SKEW = "balanced"
DEFAULT_SOURCE = "resident"  # of a query ahead
DEFAULT_NEURONS = 0.125  # share of an MLP that a query ahead sees
