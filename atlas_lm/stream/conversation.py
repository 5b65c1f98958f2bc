"""Text over a stream of tokens: read a book, ask about it, go on."""

from collections.abc import Callable, Iterable
from copy import copy
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers.generation import BaseStreamer

from atlas_lm.models import AtlasForCausalLM
from atlas_lm.stream.engine import Progress, Stream
from atlas_lm.stream.files import open_memory, save_memory
from atlas_lm.text import ByteTokenizer, TextDecoder, Tokenizer, cut
from atlas_lm.text.tokenizer import check_vocabulary

OnText = Callable[[str], object]


class Conversation:
    """A stream that takes and gives text.

    Args:
        tokenizer: that of the model; by default bytes, for a model of 259 ids.
        stream: go on with this one; by default a new one.
    """

    def __init__(
        self,
        model: AtlasForCausalLM,
        tokenizer: Tokenizer | None = None,
        stream: Stream | None = None,
    ) -> None:
        if stream is not None and stream.model is not model:
            raise ValueError("the stream was opened with another model; pass stream.model")
        self.tokenizer = _tokenizer_for(model, tokenizer)
        self.stream = Stream(model) if stream is None else stream

    def absorb(self, text: str | Iterable[str], progress: Progress | None = None) -> int:
        """Read and remember a text. Returns the number of tokens.

        Args:
            text: the whole, or its blocks as they come (`read_text`); where blocks end changes nothing.
            progress: called with the number of tokens that this call has read.
        """
        blocks = [text] if isinstance(text, str) else text
        return self.stream.absorb(map(self.tokenizer.encode, cut(blocks)), progress)

    def ask(
        self,
        question: str = "",
        max_new_tokens: int = 64,
        on_text: OnText | None = None,
        **options: Any,
    ) -> str:
        """The model's continuation of what was read and the question; nothing of it is remembered.

        Args:
            on_text: called with each piece of the answer as it comes.
            options: as `generate` of transformers takes them.
        """
        return self._generate(question, max_new_tokens, on_text, options | {"remember": False})

    def generate(
        self,
        prompt: str = "",
        max_new_tokens: int = 64,
        on_text: OnText | None = None,
        **options: Any,
    ) -> str:
        """The model's continuation of what was read and the prompt; both are remembered."""
        return self._generate(prompt, max_new_tokens, on_text, options)

    def save(self, path: str | Path, bits: int | None = None) -> None:
        """Write where the stream stands to a file (`save_memory`)."""
        save_memory(path, self.stream.model, self.stream.reading, bits)

    @classmethod
    def open(
        cls, path: str | Path, model: AtlasForCausalLM, tokenizer: Tokenizer | None = None
    ) -> "Conversation":
        """Go on where the file was saved, with the same model (`open_memory`)."""
        return cls(model, tokenizer, Stream(model, reading=open_memory(path, model)))

    def fork(self) -> "Conversation":
        """A second conversation from here on; neither changes the other."""
        other = copy(self)
        other.stream = self.stream.fork()
        return other

    def _generate(
        self, prompt: str, max_new_tokens: int, on_text: OnText | None, options: dict[str, Any]
    ) -> str:
        if on_text is not None:
            options = options | {"streamer": _Teller(self.tokenizer.decoder(), on_text)}
        ids = self.stream.generate(self.tokenizer.encode(prompt), max_new_tokens, **options)
        return self.tokenizer.decode(ids)


class _Teller(BaseStreamer):
    """Hands text on while `generate` makes it, whole characters only."""

    def __init__(self, decoder: TextDecoder, tell: OnText) -> None:
        self._decoder = decoder
        self._tell = tell
        self._prompt = True  # what comes first is the prompt

    def put(self, value: Tensor) -> None:
        if not self._prompt:
            self._say(self._decoder.feed(value.reshape(-1).tolist()))
        self._prompt = False

    def end(self) -> None:
        self._say(self._decoder.flush())

    def _say(self, text: str) -> None:
        if text:
            self._tell(text)


def _tokenizer_for(model: AtlasForCausalLM, tokenizer: Tokenizer | None) -> Tokenizer:
    size = model.config.vocab_size
    if tokenizer is not None:
        return check_vocabulary(tokenizer, size)
    if size != ByteTokenizer.vocab_size:
        raise ValueError(
            f"the model has {size} ids, which are no bytes ({ByteTokenizer.vocab_size}); pass its tokenizer, "
            "e.g. load_tokenizer(folder, vocab_size)"
        )
    return ByteTokenizer()
