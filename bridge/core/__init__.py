"""What every package needs: processes, signals, secrets, foreign code, and files that are written atomically.

May import: `bridge.errors`, `bridge.types`.
"""
