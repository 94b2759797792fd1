"""`python scripts/sweep_status.py …` is `lrattnres sweep_status …`."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])  # the clone, and not the names in this folder

from lrattnres.commands import main

if __name__ == "__main__":  # processes that a command spawns import this file, too
    main("sweep_status")
