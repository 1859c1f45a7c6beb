"""Levels of the maze game: state bytes, grids, level files and search."""
