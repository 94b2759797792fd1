"""The exceptions of the data side."""


class DataError(Exception):
    """A corpus or tokenizer that cannot be used exactly as asked. The message names the file or key
    and the remedy.
    """


class UnreadableError(DataError):
    """Data that was there at the start and cannot be read now, however often it was tried."""
