"""The same script without the folder, as the published commands also call it."""

from analysis.jacobian_analysis_plotting import main

if __name__ == "__main__":
    raise SystemExit(main())
