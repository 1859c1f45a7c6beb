"""Analyses of what the hidden state represents and what causes the behaviour."""

import common  # noqa: F401  chooses the backend before the modules here import matplotlib
