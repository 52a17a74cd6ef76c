"""llmx: a trainer for large language models in JAX."""

__version__ = "0.1.0"


def __getattr__(name: str):
    """`llmx.fit`, imported when it is used: `import llmx` alone imports nothing else."""
    if name == "fit":
        from llmx.library import fit

        return fit
    raise AttributeError(f"module 'llmx' has no attribute {name!r}")
