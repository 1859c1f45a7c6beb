"""The whole experiment: its stages, which of them are still valid, running the others, the report.

The one room that knows the scripts, which it runs by the name of their module.
"""

import common  # noqa: F401  chooses the backend before the modules here import matplotlib
