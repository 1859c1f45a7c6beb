"""Agents: networks, files, hooks, acting, recordings, PPO, and whole training runs."""

import common  # noqa: F401  chooses the backend before the modules here import matplotlib
