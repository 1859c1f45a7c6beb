"""Vector fields of agents on mazes: frames, differences, exact probabilities, figures, files."""
