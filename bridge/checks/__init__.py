"""What `bridge doctor` and `bridge verify` look at: one small function per check, each a verdict on facts.

Words: a *check* is the record of one finding (`result.py`); *facts* are what a child process finds out about torch and
the driver; a *trial* is two processes that really share memory.

May import: `bridge`, psutil, httpx and packaging; torch only inside a child process.
"""
