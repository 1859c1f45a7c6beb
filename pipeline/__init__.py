"""Pipeline of the whole experiment: its stages, their caching and execution, and the report.

This is the only package that refers to the scripts; it runs them by module name.
"""

import common  # noqa: F401  selects the backend before modules of this package import matplotlib
