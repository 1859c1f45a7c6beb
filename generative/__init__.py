"""The generative simulator: its dataset, networks, losses and published files."""

import common  # noqa: F401  selects matplotlib's backend before it is imported here
