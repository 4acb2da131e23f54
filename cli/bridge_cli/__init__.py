"""The `bridge` command: one file per subcommand, plus its flags, the live view, and the processes that it starts.

Terms: *note*, a line for people on stderr; *data*, a line for programs on stdout; *child*, a process that we started.

May import: everything but vLLM. Each command is imported when it runs, and imports torch, transformers and jinja2 only
inside its functions, so that --help and shell completion are instant.
"""
