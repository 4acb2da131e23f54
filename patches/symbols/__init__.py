"""Every symbol of vLLM that Bridge patches, calls or reads, pinned as all supported versions define it.

A symbol that `patches/` imports and that is missing here fails `tests/contract`.

May import: `patches.pins`. Not covered: checking them (`patches/compatibility.py`).
"""

from patches.pins import Pin
from patches.symbols.engine import ENGINE
from patches.symbols.generation import GENERATION
from patches.symbols.layers import LAYERS
from patches.symbols.loading import LOADING
from patches.symbols.lora import LORA
from patches.symbols.plugins import PLUGINS

SYMBOLS: tuple[Pin, ...] = (*LOADING, *PLUGINS, *ENGINE, *GENERATION, *LAYERS, *LORA)
