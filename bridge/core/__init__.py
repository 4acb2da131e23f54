"""What every package needs: processes, signals, secrets, foreign code, and files that appear whole.

May import: `bridge.errors`, `bridge.types`.
"""
