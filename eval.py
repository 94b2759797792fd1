"""`python eval.py …` is `lrattnres eval …`."""

from lrattnres.commands import main

if __name__ == "__main__":
    main("eval")
