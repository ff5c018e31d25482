"""What an operator sees: `stats.py` has the metrics and the log line, `tracing.py` the spans."""
