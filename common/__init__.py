"""Code that knows no game and no agent: command line, configuration, files, devices and video."""

import os

if not os.environ.get("MPLBACKEND", "").startswith("module://"):  # a notebook's
    # Figures go to files; matplotlib cannot even be imported where another, unknown one is asked
    # for, so this comes before its first import.
    os.environ["MPLBACKEND"] = "Agg"
