"""What every stage shares: environments, networks, configuration, files and video."""
