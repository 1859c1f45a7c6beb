"""Analyses of what the hidden state represents and what causes the behaviour."""

import common  # noqa: F401  selects the backend before any module here imports matplotlib
