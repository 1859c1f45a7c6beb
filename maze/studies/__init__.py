"""Studies of agents on mazes: the measurements behind the scripts in ``maze``."""
