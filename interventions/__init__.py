"""Alterations of the hidden state, and the paired statistics that count their effects."""

import common  # noqa: F401  chooses the backend before the modules here import matplotlib
