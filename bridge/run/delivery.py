"""Send a checkpoint to the hosts that do not have it: the first rank writes checkpoints, and disks need not be shared.

Not covered: what is in a checkpoint, and how it is checked (`checkpoint.py`).
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from bridge.core import whole_folder
from bridge.core.interrupt import deferred_interrupt
from bridge.core.process import boot_id
from bridge.errors import CheckpointError
from bridge.ranks.world import Ranks
from bridge.run import checkpoint

CHUNK_BYTES = 2**26


def deliver(folder: Path, ranks: Ranks) -> None:
    """Let every rank read the first one's checkpoint in `folder`, at the same path; called by all ranks.

    Raises:
        CheckpointError: a host has another checkpoint there.
        UsageError: the disk of a host is full or refuses.
    """
    if ranks.world_size == 1:
        return
    own = checkpoint.marker(folder)
    found = ranks.all_gather_object((own, boot_id(), str(folder.absolute())))
    wanted = found[0][0]
    assert wanted is not None, "the first rank has read it"
    for rank, (marker, *_) in enumerate(found):
        if marker not in (None, wanted):
            raise CheckpointError(
                f"{folder} on the host of rank {rank} is another checkpoint than that of rank 0",
                remedy="move it away there, or keep checkpoints in a folder that all hosts share, with --save-path",
            )
    lacking = [(place, rank) for rank, (marker, *place) in enumerate(map(tuple, found)) if marker is None]
    writers = {tuple(place): rank for place, rank in reversed(lacking)}.values()  # one for each folder
    if not writers:
        return
    with deferred_interrupt():  # the other ranks would wait for the rest
        files = ranks.run_on_rank_zero(lambda: checkpoint.file_sizes(folder))
        chunks = _sent(folder if ranks.is_rank_zero else None, files, ranks)
        ranks.run_on_all(lambda: _written(folder, chunks) if ranks.rank in writers else _drained(chunks))


def _sent(source: Path | None, files: Mapping[str, int], ranks: Ranks) -> Iterator[tuple[str, Tensor]]:
    """Send every file from its `source`, and yield it in chunks, with its name, on all ranks."""
    fault: OSError | None = None
    for name, num_bytes in files.items():
        for begin in range(0, max(num_bytes, 1), CHUNK_BYTES):  # an empty file is one empty chunk
            chunk = torch.zeros(min(CHUNK_BYTES, num_bytes - begin), dtype=torch.uint8)
            if source is not None and fault is None:
                try:
                    with (source / name).open("rb") as file:
                        file.seek(begin)
                        file.readinto(chunk.numpy().data)
                except OSError as error:
                    fault = error  # the others find that the file is not whole
            if num_bytes:
                ranks.broadcast(chunk)
            yield name, chunk
    if fault is not None:
        raise CheckpointError(f"{source} cannot be read: {fault.strerror}", remedy="take another checkpoint") from fault


def _written(folder: Path, chunks: Iterator[tuple[str, Tensor]]) -> None:
    try:
        with whole_folder.written_whole(folder, replaceable=lambda _: False) as scratch:
            for name, chunk in chunks:
                (scratch / name).parent.mkdir(parents=True, exist_ok=True)
                with (scratch / name).open("ab") as file:
                    file.write(chunk.numpy().data)
            checkpoint.read(scratch)
    finally:
        _drained(chunks)


def _drained(chunks: Iterator[tuple[str, Tensor]]) -> None:
    """Receive the rest: the other ranks count on it."""
    for _ in chunks:
        pass
