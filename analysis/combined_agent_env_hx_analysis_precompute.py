"""Find behaviours: clusters, on a t-SNE map, of the agent's and the environment's states and of the
changes of these states. A sample shows the behaviour that is most common among its first steps."""

from __future__ import annotations

from analysis.behaviours import BEHAVIOURS, add_env_flags, compute
from analysis.state_maps import precompute_script

parser, main = precompute_script(__doc__, BEHAVIOURS, compute, add_env_flags)

if __name__ == "__main__":
    raise SystemExit(main())
