"""Studies of agents on mazes: what the scripts of the findings compute, and their files."""
