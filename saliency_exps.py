"""The older name of saliency_experiments.py."""

from saliency_experiments import main

if __name__ == "__main__":
    raise SystemExit(main())
