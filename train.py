"""`python train.py …` is `lrattnres train …`."""

from lrattnres.commands import main

if __name__ == "__main__":
    main("train")
