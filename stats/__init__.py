"""Confidence intervals, tests, paired effects with controls, and rules for claims."""

import common  # noqa: F401  sets the backend before modules of this package import matplotlib
