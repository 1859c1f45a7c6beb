"""Studies of agents on mazes: what the scripts of this room measure."""
