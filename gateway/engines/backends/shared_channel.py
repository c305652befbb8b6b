"""An engine's line to the process that started it, and its socket for other gateways, as one."""

from outrider.gateway.engines.backends.engine_listener import EngineListener
from outrider.gateway.engines.backends.step_loop import Channel
from outrider.gateway.engines.backends.wire import Command, Crashed, Pong, Reply


class SharedChannel:
    """A `Channel` to an owner, who pings and stops the engine, and to gateways, who have requests.

    The listener must have been told to wake up for the owner's socket (`EngineListener.wake_for`).
    """

    def __init__(self, owner: Channel, listener: EngineListener) -> None:
        self._owner = owner
        self._listener = listener

    def receive(self, *, wait: bool) -> list[Command]:
        """All commands that have arrived; with `wait`, none after a while."""
        commands = self._owner.receive(wait=False)
        return commands + self._listener.receive(wait=wait and not commands)

    def send(self, reply: Reply, /) -> None:
        """Send a reply to those that it is for; the listener answers gateways' pings itself."""
        if isinstance(reply, Pong | Crashed):
            self._owner.send(reply)
        if not isinstance(reply, Pong):
            self._listener.send(reply)
