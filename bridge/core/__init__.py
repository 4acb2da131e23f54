"""Utilities that every package needs: processes, signals, secrets, users' code, and atomic file writes.

May import: `bridge.errors`, `bridge.types`.
"""
