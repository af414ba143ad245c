"""``python -m batchjobs``: the same as the command ``batchjobs``."""

from batchjobs.cli import main

if __name__ == "__main__":
    main(prog_name="batchjobs")
