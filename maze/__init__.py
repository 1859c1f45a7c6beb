"""Procgen's mazes: their levels, edited; how agents move in them, and what they want there."""

import common  # noqa: F401  chooses the backend before the modules here import matplotlib
