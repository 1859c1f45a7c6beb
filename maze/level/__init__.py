"""Levels of the maze game: state bytes, grids, level files, search, options and patch words."""
