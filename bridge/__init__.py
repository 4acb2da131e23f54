"""Bridge: one copy of the weights for generation and training.

Words (each has one meaning everywhere in this repository):

- *manifest*: `vllm_bridge_config.json`, what a server exports so that a trainer can attach.
- *storage*: one allocation that a handle opens (CUDA IPC, or shared memory on the CPU).
- *view*: (storage, offset, shape, stride), one parameter or a slice of a fused one.
- *layout*: which views make up which Hugging Face parameter.
- *attach*: point every parameter of a meta-device model at a view.
- *fence*: paused -> written -> published, the only window in which weights change.
- *version*: number of published updates since the server loaded.
- *mode*: how new weights reach vLLM.
- *rollout*, *group*: one sampled completion with its reward; the rollouts of one prompt.

May import: neither `patches`, `environments` nor `cli`; neither vLLM, typer nor rich.
"""

__version__ = "0.1.0"
