"""Trajectories of a recording, the advantages along them, and the steps worth looking at."""
