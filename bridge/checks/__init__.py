"""What `bridge doctor` looks at: one small function per check, each a verdict on facts that are handed to it.

Words: a *check* is the record of one finding (`result.py`); *facts* are what the *probe*, a child process, found out
about torch and the driver; a *trial* is two processes that really share memory.

May import: `bridge`, psutil, httpx and packaging; torch only inside a child process.
"""
