"""Default settings of a conversion."""

DEFAULT_SKEW = "balanced"
DEFAULT_SOURCE = "resident"  # of a corrected query
