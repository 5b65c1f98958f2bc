"""The demo: four small experiments that show what a test-time memory is good for, in a minute or two."""

from atlas_lm.demo.run import run_demo

__all__ = ["run_demo"]
