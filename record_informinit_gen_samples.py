"""The older name of record_gen_samples.py."""

from record_gen_samples import main

if __name__ == "__main__":
    raise SystemExit(main())
