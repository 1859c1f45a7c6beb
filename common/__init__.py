"""Code independent of games and agents: command line, configuration, files, devices and video."""

import os

if not os.environ.get("MPLBACKEND", "").startswith("module://"):  # in a notebook
    # Figures are written to files. matplotlib cannot be imported if MPLBACKEND names an unknown
    # backend, so the backend is set before the first import.
    os.environ["MPLBACKEND"] = "Agg"
