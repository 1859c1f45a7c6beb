"""An agent's behaviour on every square of a maze: fields, their differences, exact probabilities."""
