"""Endless contexts: ids in, ids out, constant memory; memories that are saved, reopened and forked."""
