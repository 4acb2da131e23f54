"""Tinker: the API of Thinking Machines' SDK, answered by one copy of the weights.

Terms, as the SDK uses them: *model* (what one training client trains), *session* (one client program, alive while it
sends heartbeats), *datum* (a sequence with what its loss reads), *future* (an answer that the client polls for),
*snapshot* (weights that a sampling client samples from), *inflight* (weights that change under it).
May import: every package of `bridge` but `trl`.
"""
