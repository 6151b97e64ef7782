"""SPEAKS ENGINE: everything that runs inside an engine's process.

`blocks` moves bytes between engine memory and extents and is the only place where torch stands in
a copy path; each engine has a folder of its own. A connector turns every error into a miss.
"""
