"""Agents: networks, agent files, hooks, recordings, PPO and training runs."""

import common  # noqa: F401  chooses the backend before the modules here import matplotlib
