"""The one interface to an engine core, in this process, in a child process or in a daemon.

`client.py` is the interface, and `inproc_client.py` and `mp_client.py` implement it. `guard.py`
admits one thread of the owning process at a time.
"""
