"""Procgen's mazes: levels read, edited and drawn, and how agents behave in them."""
