"""Endless contexts: ids in, ids out, constant memory; memories that are saved, reopened and forked."""

from atlas_lm.stream.conversation import Conversation
from atlas_lm.stream.engine import Stream
from atlas_lm.stream.files import open_memory, save_memory
from atlas_lm.stream.header import MemoryFileError
from atlas_lm.stream.reading import Reading

__all__ = [
    "Conversation",
    "MemoryFileError",
    "Reading",
    "Stream",
    "open_memory",
    "save_memory",
]
