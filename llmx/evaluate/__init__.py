"""What a run has learned: losses on held-out text, multiple choice, tasks of other harnesses."""
