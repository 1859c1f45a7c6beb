"""Intervals, tests, paired effects with controls, and the claims made from them."""

import common  # noqa: F401  chooses the backend before the modules here import matplotlib
