"""What happens when an engine dies: `supervised_client.py` replaces it and submits its requests to
the next one, which `resubmission.py` orders; `recovery.py` starts engines; `restart_budget.py`
limits the restarts; `engine_state.py` is what clients have set in the engine; `standby.py` keeps a
second engine process, which `standby_engines.py` starts.
"""
