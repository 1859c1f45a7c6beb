"""The attribution page: what it shows, and its files."""
