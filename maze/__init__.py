"""Procgen's maze game: reading, editing and rendering levels, and studies of agents in them."""
