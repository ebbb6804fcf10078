"""Measurement of a running job: step times by part, communication, memory, stragglers, traces, records.

May import machine and distributed; sinks and the training loop read its results.
"""
