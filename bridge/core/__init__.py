"""What every package needs and what knows none of them: processes, signals, secrets, and files written whole.

May import: `bridge.errors`, `bridge.types`.
"""
