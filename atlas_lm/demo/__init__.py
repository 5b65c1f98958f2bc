"""The demo: facts hidden in a real book, a model that reads it once and is asked about them."""

from atlas_lm.demo.run import run_demo

__all__ = ["run_demo"]
