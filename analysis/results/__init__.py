"""What analyses have in common: their steps, what they write, the samples they read."""
