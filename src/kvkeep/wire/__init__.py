"""SPEAKS: the control protocol between engine and server. Sans-I/O; no KV byte crosses it."""
