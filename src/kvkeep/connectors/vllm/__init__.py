"""SPEAKS ENGINE: the vLLM connector, on vLLM's public KV connector hooks.

`connector` is the class vLLM builds, once per role; `scheduler_side` and `worker_side` do the work;
`identity` says what makes two requests' KV the same bytes; `plugin` registers it.
"""
