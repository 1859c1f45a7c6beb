"""Colours and resolution of all figures."""

# Okabe and Ito's palette for colour-blind readers, without black.
ORANGE, SKY_BLUE, GREEN, VERMILION, BLUE, PURPLE, YELLOW = COLOURS = (
    "#E69F00", "#56B4E9", "#009E73", "#D55E00", "#0072B2", "#CC79A7", "#F0E442")
DARK_GREY = "#555555"
DPI = 110
