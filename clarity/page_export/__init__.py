"""The clarity page: what it shows, and its files."""
