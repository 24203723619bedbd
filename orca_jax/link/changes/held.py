"""Requests that wait in front of an engine, until a change is made."""

from orca_jax.link.wire import Abort, Submit


class HeldRequests:
    """Requests in the order of their arrival."""

    def __init__(self) -> None:
        self._requests: dict[str, Submit] = {}

    def take_message(self, message: Submit | Abort) -> bool:
        """Hold a new request, or drop a held one after its abort.

        Returns:
            True if nothing is left to do. False if the engine must get the message: the abort of another request.
        """
        if isinstance(message, Submit):
            self._requests[message.request_id] = message
            return True
        return self._requests.pop(message.request_id, None) is not None

    def release(self) -> list[Submit]:
        """All held requests; none is held afterwards."""
        released = list(self._requests.values())
        self._requests.clear()
        return released
