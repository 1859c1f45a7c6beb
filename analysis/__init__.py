"""What the hidden state represents and what causes the behaviour: one module a method."""

import common  # noqa: F401  chooses the backend before the modules here import matplotlib
