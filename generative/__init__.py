"""The simulator of the agent in its environment."""
