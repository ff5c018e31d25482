"""Runs a step: slots of requests, the step's inputs, the model runner, bursts, CUDA graphs and state on
a device.
"""
