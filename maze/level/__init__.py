"""Levels of the maze game: state bytes, grids, level files, search, flags and patch options."""
