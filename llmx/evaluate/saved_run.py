"""A run as it is evaluated after training: its config for the devices that are here, its model."""

import dataclasses
from collections.abc import Sequence

import jax

from llmx import config, sharding
from llmx.checkpoint import model_params
from llmx.checkpoint.restore import Restored
from llmx.config import checks, effects, preference_checks
from llmx.data import tokenizers
from llmx.data.config import DataConfig
from llmx.evaluate import held_out
from llmx.runtime import launch
from llmx.step.step import Recipe


def config_of(
    run: config.Config, workdir: str, *, sources: Sequence[str] = (), own_data: bool = False,
    tensor: int = 1,
) -> config.Config:  # fmt: skip
    """The resolved config of a run for a forward pass on whatever devices are here.

    Args:
      run: as `config.load_run` returns it; it is changed.
      sources: plain text in place of the run's data.
      own_data: the run's data is read, and what it has to be evaluated by: of preferences the
        loss of pairs, which takes the reference too.
      tensor: devices that share each layer; the others hold other rows of a batch.

    Raises ValueError where the model does not fit these devices.
    """
    if run.mesh.stage > 1:
        run.batch.accumulation = 1  # its own evaluations too take the batch of a step
    # The checkpoint fits any mesh, and a pass needs no stages.
    run.mesh = sharding.MeshConfig(tensor=tensor)
    run.sync.groups = 1  # others take no part, and where they meet is this machine's to say
    run.start_from = ""  # which may be gone
    of_pairs = run.preference if own_data and preference_checks.is_on(run) else None
    checks.forget_training(run)
    if of_pairs is not None:
        run.preference = of_pairs
    if not own_data:
        # Any rows will do, and so those that the devices divide.
        rows, ways = held_out.batch_size(run), max(jax.device_count() // tensor, 1)
        run.batch.size, run.batch.accumulation = -(-rows // ways) * ways, 1
        own = f"{workdir}/{tokenizers.FILE_NAME}"
        of_text = DataConfig(tokenizer=own, cache_dir=run.data.cache_dir, bos=run.data.bos)
        run.data = dataclasses.replace(
            of_text, sources=tuple(sources) or of_text.sources, text_key=run.data.text_key
        )
    return checks.resolve(effects.without_idle(run), jax.device_count())


def params_of(
    run: config.Config, recipe: Recipe, workdir: str, *, step: int | None = None
) -> Restored:  # fmt: skip
    """The parameters of a checkpoint, or their average where the run keeps one; adapters merged.

    step: None = the newest. Raises ValueError where there is none.
    """
    return model_params.restore_evaluated(
        workdir, recipe, ema=run.optimizer.ema_decay > 0, step=step, log=launch.note
    )


def evaluated(
    run: config.Config, recipe: Recipe, workdir: str, *, step: int | None = None
) -> Restored:  # fmt: skip
    """What `TrainingLoss.evaluated` returns, of a checkpoint: of preferences with the reference."""
    found = params_of(run, recipe, workdir, step=step)
    if recipe.loss.preference is None:
        return found
    reference = model_params.restore_reference(
        workdir, recipe.loss.frozen, step=found.step, log=launch.note
    )
    return found._replace(state=(found.state, reference.state))
