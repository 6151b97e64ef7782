"""DECIDES: the pure core. No I/O, clock, threads, logging or torch; time and chance are arguments.

Events go in through one door (`directory.Directory.handle`), replies and effects come out, and
`audit.check` verifies every invariant of DESIGN section 5.
"""
