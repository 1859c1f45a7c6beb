"""Agents of "Understanding RL Vision" (Hilton et al. 2020), read from their published files."""
