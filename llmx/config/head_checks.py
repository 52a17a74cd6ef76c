"""What is checked of the head's chunks."""

import math
from collections.abc import Iterator

from llmx import sharding
from llmx.config import Config
from llmx.model import losses

MOST_CHUNKS = 32  # times as many as the limits of a chunk of the head ask for


def chunks(config: Config, sizes: dict[str, int], rows: int, over: str) -> Iterator[str]:
    """A given number divides a device's rows; and with none given their parts are not a row or two,
    as they would be of rows with few divisors. `over`: the mesh axes that split the rows, in words.
    """
    if config.loss.chunks:
        if rows % config.loss.chunks:
            yield (
                f"loss.chunks={config.loss.chunks} does not divide the {rows} rows of the head per "
                f"device ({over}): use a divisor, or 0 = automatic"
            )
        return
    ways = math.prod(sizes[axis] for axis in (*sharding.BATCH_AXES, "sequence"))
    tokens = config.batch.size * config.batch.sequence_length
    tokens = max(1, tokens // (ways * max(1, config.batch.accumulation)))
    found = losses.num_chunks(tokens, rows)
    if found > MOST_CHUNKS * math.ceil(rows / losses.most_rows(tokens)):
        yield (
            f"model.vocab_size={config.model.vocab_size}, model.vocab_multiple="
            f"{config.model.vocab_multiple}: the {rows} rows of the head on a device divide into "
            f"{found} chunks of {rows // found} only: use model.vocab_multiple=128, or "
            "loss.chunks=1 for all at once"
        )
