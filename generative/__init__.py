"""The generative simulator: its dataset, networks, losses and published files."""

import common  # noqa: F401  chooses the backend before the modules here import matplotlib
