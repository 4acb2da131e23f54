"""The checks of `bridge doctor` and `bridge verify`: each is a small function that judges facts.

A *check* is one result (`result.py`). *Facts* are what a child process reports about torch and the driver. A *trial* is
two processes that share memory for real.

May import `bridge`, psutil, httpx and packaging; torch only inside a child process, or in `verify.py`.
"""
