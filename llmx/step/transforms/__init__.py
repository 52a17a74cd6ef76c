"""Changes of what is minimized and of its gradient (`llmx.contract.Transform`), one a file."""
