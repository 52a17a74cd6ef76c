"""The likeliest next tokens of a teacher, in memory-mapped files: see `teacher_files`."""

import dataclasses
import functools

import numpy as np


@dataclasses.dataclass(frozen=True)
class TeacherTokens:
    """Opened files: a memory-mapped array for each shard."""

    ids: tuple[np.ndarray, ...]  # [tokens, K]
    log_p: tuple[np.ndarray, ...]  # [tokens, K+1]
    top_k: int

    def read(self, shard: int, begin: int, end: int, top_k: int) -> tuple[np.ndarray, np.ndarray]:
        """Of tokens [begin, end) of a shard the `top_k` likeliest: (ids int32 [n, k], log p fp32
        [n, k+1]), with those that are left out among the others."""
        ids = self.ids[shard][begin:end, :top_k].astype(np.int32)
        log_p = self.log_p[shard][begin:end].astype(np.float32)
        if top_k == self.top_k:
            return ids, log_p
        others = functools.reduce(np.logaddexp, log_p[:, top_k:].T)
        return ids, np.concatenate([log_p[:, :top_k], others[:, None]], axis=1)
