"""The one interface to an engine core, in this process, in a child process or in a daemon.

`client.py` is the interface, `inproc_client.py` and `mp_client.py` implement it; `guard.py` admits
one thread at a time, of the owning process.
"""
