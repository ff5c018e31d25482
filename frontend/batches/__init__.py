"""Batches: files of requests that are answered in the background, and what is kept of them on disk.

Must not know: HTTP, engines, how a request is answered.
"""
