"""kvkeep keeps the KV cache of LLM engines alive outside the engine.

Rooms: `core` decides, `server` runs, `wire` speaks, `client` and `connectors` sit in the engine,
`bench` measures, `testing` proves, `cli` is for people. docs/ARCHITECTURE.md walks one request
through them.
"""

__version__ = "0.1.0"
