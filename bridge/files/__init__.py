"""Files and folders that appear whole or not at all, and belong to one process at a time.

Words: *whole* (written aside and renamed), *claim* (a lock on a folder), *run directory* (everything that one run
leaves behind).
May import: `bridge.config`, `bridge.errors` and records free of torch.
"""
