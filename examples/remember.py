"""Told once, asked after a hundred thousand tokens, and again tomorrow from a file.

python examples/remember.py
"""

import tempfile
from pathlib import Path

from atlas_lm import AtlasForCausalLM, Conversation

here = Path(__file__).parent
model = AtlasForCausalLM.from_pretrained(
    here / "recall-tiny"
)  # knows letters and digits, 133,000 weights

reader = Conversation(model)
reader.absorb("k=7 q=2 b=4 ")
reader.absorb("." * 100_000)  # a long time in which nothing happens
print("k is", reader.ask("k?", max_new_tokens=1), "after", reader.stream.tokens, "tokens")
print("the memory has", reader.stream.bytes, "bytes, as it had from the start")

with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "today.mem"
    reader.save(file)
    again = Conversation.open(file, model)  # tomorrow, in another process
    print("b is", again.ask("b?", max_new_tokens=1), "still")

    other = again.fork()  # two futures of one past
    other.absorb("b=9 ")
    print(
        "b is",
        other.ask("b?", max_new_tokens=1),
        "in one,",
        again.ask("b?", max_new_tokens=1),
        "in the other",
    )
    other.stream.rollback(tokens=4)  # take it back
    print("b is", other.ask("b?", max_new_tokens=1), "again")
