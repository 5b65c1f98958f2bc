"""Loads, stores, and copies that run beside a warp."""

import re
from typing import Any

import numpy as np

from tests.hopper.decoder import Decoder, Maker
from tests.hopper.formats import KINDS, WORDS
from tests.hopper.machine import LANES, REST, Code, Fault, Lanes, Warp
from tests.hopper.parse import Instruction


def make_load(d: Decoder, i: Instruction) -> Code:
    """ld of parameters, global and shared memory, one word or several."""
    target, source = i.operands
    parts = i.name.split(".")
    name = parts[-1]
    word = WORDS[name]
    targets = [d.place(t, word) for t in (target if isinstance(target, tuple) else (target,))]
    kind = KINDS[name] if name[0] == "s" else word  # a wider register is filled with the sign
    wide = [d.registers[t].dtype for t in targets]
    if "param" in parts:
        found = re.fullmatch(r"\[\w+_param_(\d+)\]", str(source))
        assert found and len(targets) == 1, i
        number = int(found[1])

        def parameter(w: Warp) -> Lanes:
            bits = np.full(LANES, w.block.arguments[number], np.uint64)
            return bits.astype(word).view(kind).astype(wide[0])

        return d.writes(i, targets, parameter)
    shared = "shared" in i.name
    at, offset = d.address(str(source), np.uint32 if shared else np.uint64)
    guard, size = d.guard(i), np.dtype(word).itemsize

    def load(w: Warp) -> Any:
        memory = w.block.shared if shared else w.block.memory
        address = w.registers[at].astype(np.int64) + offset
        words = memory.load(address, guard(w), size, len(targets))
        words = [x.view(kind).astype(to, copy=False) for x, to in zip(words, wide, strict=True)]
        return words if len(targets) > 1 else words[0]

    run = d.writes(i, targets, load)
    return resting(run) if "acquire" in parts else run


def resting(run: Code) -> Code:
    """Whoever looks for a sign lets others go on."""

    def step(w: Warp) -> int:
        run(w)
        return REST

    return step


def make_store(d: Decoder, i: Instruction) -> Code:
    target, source = i.operands
    word = WORDS[i.name.split(".")[-1]]
    sources = [d.place(s, word) for s in (source if isinstance(source, tuple) else (source,))]
    shared = "shared" in i.name
    at, offset = d.address(str(target), np.uint32 if shared else np.uint64)
    guard, size = d.guard(i), np.dtype(word).itemsize

    def store(w: Warp) -> None:
        memory = w.block.shared if shared else w.block.memory
        address = w.registers[at].astype(np.int64) + offset
        words = [w.registers[s].astype(word, copy=False) for s in sources]
        memory.store(address, guard(w), size, words)
        if shared:
            w.block.shared.mark(address, guard(w), size * len(sources), w.number)

    return store


def make_addition(d: Decoder, i: Instruction) -> Code:
    """atom.add, lane after lane: what was there before."""
    target, address, term = map(str, i.operands)
    parts = i.name.split(".")
    if "add" not in parts or "global" not in parts or WORDS[parts[-1]] is not np.uint32:
        raise Fault(f"the emulator does not know {i}")
    at, offset = d.address(address, np.uint64)
    to, by, guard = d.place(target, np.uint32), d.place(term, np.uint32), d.guard(i)

    def add(w: Warp) -> None:
        memory, found = w.block.memory, w.registers[to].copy()
        for lane in guard(w).nonzero()[0]:
            one, here = np.arange(LANES) == lane, w.registers[at].astype(np.int64) + offset
            [before] = memory.load(here, one, 4)
            memory.store(here, one, 4, [before + w.registers[by]])
            found[lane] = before[lane]
        w.registers[to] = found
        memory.signals += 1

    return add


def make_copy(d: Decoder, i: Instruction) -> Code:
    """cp.async: from global to shared memory beside the warp; what the source lacks becomes zero."""
    if "commit_group" in i.name:
        return _commit_copies
    if "wait_group" in i.name or "wait_all" in i.name:
        pending = int(str(i.operands[0])) if i.operands else 0
        return lambda w: w.finish_copies(pending)
    to, source, size, *rest = map(str, i.operands)
    (to_at, to_offset), (at, offset) = d.address(to, np.uint32), d.address(source, np.uint64)
    length = d.place(rest[0] if rest else size, np.uint32)
    count, guard = int(size, 0), d.guard(i)

    def copy(w: Warp) -> None:
        mask = guard(w)
        there = w.registers[to_at].astype(np.int64) + to_offset
        here = w.registers[at].astype(np.int64) + offset
        given = w.registers[length]
        assert ((given == 0) | (given == count) | ~mask).all(), "copies are whole or nothing"

        def move() -> None:
            words = w.block.memory.load(here, mask & (given > 0), 4, count // 4)
            w.block.shared.store(there, mask, 4, words)
            w.block.shared.mark(there, mask, count, None)

        if w.block.order.late:
            w.open.append(move)
        else:
            move()

    return copy


def _commit_copies(w: Warp) -> None:
    w.copies.append(w.open)
    w.open = []


TRANSFERS: dict[str, Maker] = dict(ld=make_load, st=make_store, cp=make_copy, atom=make_addition)
