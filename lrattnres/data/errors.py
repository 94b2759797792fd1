"""The one exception of the data side."""


class DataError(Exception):
    """A corpus or tokenizer that cannot be used exactly as asked. The message names the file or key and the remedy."""
