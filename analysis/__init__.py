"""What the agent's hidden state represents and what causes its behaviour."""
