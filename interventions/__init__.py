"""Interventions on the agent's layers and hidden state, their controls, and their effects."""

import common  # noqa: F401  selects the backend before modules of this package import matplotlib
