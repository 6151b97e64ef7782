"""MEASURES: the demo model and the benches over objects and engines.

Benches stand where a user stands: they start `kvkeep serve` as a process and never import the
server.
"""
