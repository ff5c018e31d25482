"""The figures that an operator sees: `stats.py` has the statistics, `tracing.py` the spans, and
`server_metrics.py` the metrics of OpenTelemetry.
"""
