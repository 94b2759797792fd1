"""`python -m lrattnres NAME words`, and `torchrun … -m lrattnres NAME words`."""

from __future__ import annotations

from lrattnres.commands import main

if __name__ == "__main__":  # processes that a command spawns import this file, too
    main()
