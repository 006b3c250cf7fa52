"""Default settings of a conversion."""

DEFAULT_SKEW = "balanced"
DEFAULT_SOURCE = "resident"  # of a corrected query
DEFAULT_NEURONS = 0.125  # share of an MLP that a corrected query sees
