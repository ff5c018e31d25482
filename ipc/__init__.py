"""The wire: configuration, parameters, messages, codec, sockets and processes. `models`
reads what the files of a model say.

Must not know: torch, numpy, or any other package of quire (ipc is a leaf that all may import).
"""
