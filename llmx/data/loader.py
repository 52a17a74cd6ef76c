"""The iterator of one process: its rows of every global batch, prepared ahead by grain threads."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from llmx.data import dataset as dataset_lib

_MAX_STEPS = 1 << 62


class Loader:
    """Yields (step, batch) from `start_step` on, without end.

    `rows` are those of the global batch that this process produces. Its batches are
    `dataset.train_rows(step, rows, batch_size)` whatever the number of threads.
    """

    def __init__(
        self, dataset: dataset_lib.Dataset, *, batch_size: int, rows: Sequence[int],
        start_step: int = 0, batch_of: Callable[[int], int] = lambda step: step,
        ahead: Mapping[str, str] | None = None,
    ):  # fmt: skip
        """batch_of: of a step, the number of the batch that it takes. ahead: arrays that a batch
        has of the next one too, by the name that they have there their name here."""
        import grain

        rows = tuple(int(row) for row in rows)
        threads = dataset.num_threads if dataset.prefetch else 0
        dataset.train_rows(
            batch_of(start_step), rows[:1], batch_size
        )  # raises here, not in a thread

        def produce(step: int) -> dict[str, np.ndarray]:
            return dataset.train_rows(batch_of(step), rows, batch_size)

        self._fingerprint = dataset.fingerprint
        options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=dataset.prefetch)
        batches = grain.MapDataset.range(_MAX_STEPS).map(produce).to_iter_dataset(options)
        self._iterator, self._ahead = iter(batches), dict(ahead or {})
        self._seek(start_step)

    def _seek(self, step: int) -> None:
        if step < 0:
            raise ValueError(f"step={step} is negative: steps count from 0")
        self._iterator.set_state({"next_index": step})
        self._step, self._next = step, None
        self._iterator.start_prefetch()

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> tuple[int, dict[str, np.ndarray]]:
        batch = next(self._iterator) if self._next is None else self._next
        if self._ahead:
            self._next = next(self._iterator)
            batch = batch | {own: self._next[name] for name, own in self._ahead.items()}
        self._step += 1
        return self._step - 1, batch

    def state(self) -> dict[str, int | str]:
        """The step that comes next and the data's fingerprint; fit for JSON."""
        return {"step": self._step, "fingerprint": self._fingerprint}

    def set_state(self, state: Mapping[str, int | str]) -> None:
        """Goes on exactly where a loader of the same data stood when it gave this state."""
        if state["fingerprint"] != self._fingerprint:
            raise ValueError(
                f"the data differs from that of the saved state (fingerprint "
                f"{self._fingerprint[:12]}, saved {str(state['fingerprint'])[:12]}): restore the "
                "data section, sequence length and seed of that run and the same files, or start "
                "a new run"
            )
        self._seek(int(state["step"]))

    def close(self) -> None:
        """Stops the threads; the loader cannot be used afterwards."""
        self._iterator.close()
