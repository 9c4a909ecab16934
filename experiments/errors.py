"""The two ways in which a command ends badly; each text is one sentence for the person who typed it."""


class RequestError(ValueError):
    """The request was wrong: file, key, what was found, what is allowed (exit 2)."""


class RunFailure(Exception):
    """The request was right, but the run failed or the answer is no (exit 1)."""
