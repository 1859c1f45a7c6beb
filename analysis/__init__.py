"""What the hidden state represents and what causes the behaviour: one module a method."""
