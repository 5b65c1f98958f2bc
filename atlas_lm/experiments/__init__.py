"""Four small experiments that show what a test-time memory is good for, in a minute or two."""

from atlas_lm.experiments.run import run_experiments

__all__ = ["run_experiments"]
