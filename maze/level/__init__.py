"""Levels of the game maze: their state bytes, squares and words, files, searches and pairs."""
