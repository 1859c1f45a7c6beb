"""Older name of loss_over_time_experiment.py."""

from loss_over_time_experiment import main

if __name__ == "__main__":
    raise SystemExit(main())
