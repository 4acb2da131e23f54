"""What runs inside vLLM: two plugins, a worker extension, and the patches they apply.

`plugin.py` patches each of vLLM's processes, `worker.py` exports and inspects one rank's weights, and `routes.py` adds
`/bridge/*` to the API server. Each file pins what it needs of vLLM in `PINS` (`pins.py`).

May import: vLLM, and of `bridge` the errors, `core`, `server`, `weights`, `passes.layers` and
`rollouts.distribution`.
"""
