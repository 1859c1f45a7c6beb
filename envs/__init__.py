"""Procgen: environments, level states and the objects in them."""

import common  # noqa: F401  chooses the backend before the modules here import matplotlib
