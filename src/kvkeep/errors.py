"""Every error kvkeep raises on purpose, under one root.

Foreign exceptions are turned into one of these at the edge where they appear. A message names the
thing, the limit and the fix. Inside an engine none is ever raised: there they become misses.
"""


class KVKeepError(Exception):
    """Root of all kvkeep errors."""


class ConfigError(KVKeepError):
    """A setting is unknown, has the wrong type, or is out of range."""


class LayoutUnsupported(KVKeepError):
    """The engine's KV tensors have a shape whose blocks cannot be copied as opaque runs."""


class SocketError(KVKeepError):
    """The control socket cannot be made, bound or reached."""


class ProtocolError(KVKeepError):
    """The peer sent bytes that are not this protocol; the connection ends."""


class Refused(KVKeepError):
    """The server said no at the handshake; the text is the server's sentence."""


class MemoryRefused(KVKeepError):
    """The arena cannot be made, mapped or populated."""


class ServerAway(KVKeepError):
    """The server did not answer in time or is not there."""


class BackendError(KVKeepError):
    """An L2 backend cannot be opened or used; the text names it and the fix."""
