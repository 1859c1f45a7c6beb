"""The states of the simulated environment."""
