"""Whether an error came from a communication library, which often blames a healthy peer."""

_COMMUNICATION = ("gloo", "nccl", "c10d", "connection", "broken pipe", "timed out", "socket")


def from_communication(error: BaseException) -> bool:
    """Whether a communication library raised `error` or what led to it.

    gloo raises plain RuntimeErrors: only their text tells.
    """
    cause: BaseException | None = error
    while cause is not None:
        text = str(cause).lower()
        if isinstance(cause, RuntimeError) and any(word in text for word in _COMMUNICATION):
            return True
        cause = cause.__cause__ or cause.__context__
    return False
