"""The wire: configuration, parameters, messages, codec, sockets and processes.

Must not know: torch, numpy, or any other package of quire (ipc is a leaf that all may import).
"""
