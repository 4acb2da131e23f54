"""What runs inside vLLM: two plugins, a worker extension, and the patches they apply.

Words: manifest, storage, view, layout, fence, version (see `bridge`). The general plugin (`plugin.py`)
wraps the model runners; the worker extension (`worker.py`) exports and inspects one rank's weights;
the endpoint plugin (`routes.py`) adds `/bridge/*` and writes the manifest.

May import: vLLM, and of `bridge` the errors, the protocol, the process identities and `bridge.weights`.
"""
