"""RUNS: the server. One asyncio thread: wire -> core (pure) -> effects.

`run` composes it, `rpc` carries frames and descriptors, `service` is the only caller of the core,
`timeline` remembers what happened to each request, `http` answers probes and scrapes.
"""
