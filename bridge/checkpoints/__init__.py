"""The files that a run writes: its directory, its records, and checkpoints that can be resumed and exported.

Terms: *checkpoint* (a Hugging Face folder with additional files to resume a run), *marker* (the file that completes a
checkpoint), *run directory* (all files of a run), *record* (one line of such a file), *metric* (one number in a line).
May import: `bridge.config`, `bridge.core`, `bridge.ranks`, `bridge.server`, `bridge.optimizers` and `bridge.weights`;
nothing that generates or trains.
"""
