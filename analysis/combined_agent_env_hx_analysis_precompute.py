"""Find behaviours: clusters of the agent's and the environment's states and of their changes on a
t-SNE map. A sample shows the behaviour that is most common among its first steps."""

from __future__ import annotations

from analysis.behaviours import BEHAVIOURS, add_env_flags, compute
from analysis.state_maps import precompute_script

parser, main = precompute_script(__doc__, BEHAVIOURS, compute, add_env_flags)

if __name__ == "__main__":
    raise SystemExit(main())
