"""What a run leaves on disk: its directory, the lines of its records, and checkpoints that can be resumed and exported.

Words: *checkpoint* (a Hugging Face folder plus what a run needs to resume), *marker* (the file that makes it whole),
*run directory* (all files of a run), *record* (one line of a file of it), *metric* (one number of a line).
May import: `bridge.config`, `bridge.core`, `bridge.ranks`, `bridge.server`, `bridge.optimizers` and `bridge.weights`;
nothing that generates or trains.
"""
