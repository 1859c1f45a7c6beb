"""Parameters and flags of the analyses."""
