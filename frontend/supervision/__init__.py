"""What happens when an engine dies: `supervised_client.py` starts it again and submits its
requests to the new one, which `resubmission.py` orders; `restart_budget.py` limits the restarts;
`engine_state.py` is what clients have set in the engine; `watchdog.py` notices an engine that
hangs.
"""
