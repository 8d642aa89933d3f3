"""Run folders, checkpoints, and what is shown of a run."""
