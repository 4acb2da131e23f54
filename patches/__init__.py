"""What runs inside vLLM: two plugins, a worker extension, and the patches they apply.

The general plugin (`plugin.py`) patches each of vLLM's processes, the worker extension (`worker.py`) exports and
inspects one rank's weights, and the endpoint plugin (`routes.py`) adds `/bridge/*` and writes the manifest.

May import: vLLM, and of `bridge` the errors, the protocol, process identities, the name of the API key, `weights`,
`passes.wide_linear` and `rollouts.distribution`.
"""
