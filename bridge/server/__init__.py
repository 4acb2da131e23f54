"""A patched vLLM as its clients see it: the manifest it exports, the routes under `/bridge/*`, and the fence.

Terms: *manifest* (what a server exports so that a trainer can attach), *shard* (what one of its ranks exports),
*lease* (the right to update a server), *fence* (pause, write, publish), *version* (number of published updates).
May import: `bridge.core`.
"""
