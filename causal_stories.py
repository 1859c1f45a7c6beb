"""The same script without the folder, as the other analyses can also be called."""

from analysis.causal_stories import main

if __name__ == "__main__":
    raise SystemExit(main())
