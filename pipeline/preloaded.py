"""Module that the fork server imports, so that the stages need not load the same things again.

PyTorch's optimisers import ``torch._dynamo``, and the first environment of a process loads the
images of Procgen; both take a second. Python runs the imports of run_pipeline.py in every process.
"""

import contextlib

import torch._dynamo  # noqa: F401

import pipeline.report
import pipeline.submission  # noqa: F401
from common.errors import UserError
from envs.procgen_env import EnvConfig, StateView

with contextlib.suppress(UserError):  # Procgen may be missing
    StateView(EnvConfig("coinrun", "hard")).close()
