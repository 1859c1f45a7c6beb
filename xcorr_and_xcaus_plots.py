"""The same script without the folder, as the published commands also call it."""

from analysis.xcorr_and_xcaus_plots import main

if __name__ == "__main__":
    raise SystemExit(main())
