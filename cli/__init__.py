"""The `bridge` command: it turns flags into choices, starts and stops processes, and prints what happens.

Words: *note*, a line for people on stderr; *data*, a line for programs on stdout; *child*, a process that we started.

May import: everything but vLLM; the heavy parts (torch, transformers, jinja2) inside the commands alone, so that
`bridge --help` answers at once.
"""
