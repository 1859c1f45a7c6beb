"""Gradients through the simulator: functions, files, pictures, runs."""
