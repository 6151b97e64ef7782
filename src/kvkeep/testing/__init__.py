"""PROVES, shipped with the package: the virtual loop and the simulator.

The one room that composes the server, the wire and the core without a socket.
"""
