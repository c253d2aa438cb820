"""Are the operands of matrix products set, in machine code, on every path that leads to them?

An HGMMA instruction reads where its operands lie in shared memory from uniform registers. A
compiler that moves the code that sets them to where it does not always run leaves in them what was
there before: ptxas of CUDA 12.8 did so for the second of two loops when the first ran zero times.
"""

import re
from dataclasses import dataclass, field

LABEL = re.compile(r"^(\.L_x_\d+):")
INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]+)\*/\s+(.*)")
UNIFORM = re.compile(r"\bUR(\d+)\b")
PREDICATE = re.compile(r"^@!?U?P\w+\s+")
# Instructions that write a uniform register, their first one.
WRITERS = re.compile(r"^(U(?!TMA|SETMAXREG|BLK)|R2UR|S2UR|VOTEU)")
# What barriers are initialised with, or what another partition computed, is no operand.
FORGETS = re.compile(r"^(SYNCS\.EXCH|BRX)")
DESCRIPTOR = re.compile(r"gdesc\[UR(\d+)\]")


@dataclass
class Block:
    """Instructions (address, text) that run one after the other, and where they may lead."""

    code: list[tuple[str, str]] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)
    falls_through: bool = True


def unset_operands(machine_code: str) -> list[str]:
    """The products some operand of which is not set on every path, as "address: instruction"."""
    blocks, labels = _blocks(machine_code)
    successors = [
        [labels[target] for target in block.targets]
        + ([number + 1] if block.falls_through and number + 1 < len(blocks) else [])
        for number, block in enumerate(blocks)
    ]
    known: list[frozenset[int] | None] = [None] * len(blocks)
    known[0] = frozenset()
    waiting = [0]
    while waiting:
        number = waiting.pop()
        after = frozenset(_run(blocks[number], known[number]))
        for successor in successors[number]:
            before = known[successor]
            met = after if before is None else before & after
            if met != before:
                known[successor] = met
                waiting.append(successor)
    return [
        found
        for block, registers in zip(blocks, known, strict=True)
        if registers is not None
        for found in _unset(block, registers)
    ]


def _blocks(machine_code: str) -> tuple[list[Block], dict[str, int]]:
    blocks, labels = [Block()], {}
    for line in machine_code.splitlines():
        if label := LABEL.match(line):
            blocks.append(Block())
            labels[label[1]] = len(blocks) - 1
        elif instruction := INSTRUCTION.match(line):
            address, text = instruction.groups()
            blocks[-1].code.append((address, text))
            if re.search(r"\b(BRA|BRX|EXIT|RET)\b", text):
                blocks[-1].targets = re.findall(r"\.L_x_\d+", text)
                always = PREDICATE.match(text) is None
                blocks[-1].falls_through = not always
                blocks.append(Block())
    return blocks, labels


def _run(block: Block, registers: frozenset[int] | None) -> set[int]:
    """The uniform registers that are set after a block."""
    known = set(registers or ())
    for _, text in block.code:
        _execute(text, known)
    return known


def _unset(block: Block, registers: frozenset[int]) -> list[str]:
    known, found = set(registers), []
    for address, text in block.code:
        if (descriptor := DESCRIPTOR.search(text)) and not _operands(text, descriptor) <= known:
            found.append(f"{address}: {text}")
        _execute(text, known)
    return found


def _operands(text: str, descriptor: re.Match) -> set[int]:
    """A descriptor is two registers; the right operand's comes after the left one's, if that is in
    shared memory too."""
    first = int(descriptor[1])
    left_in_registers = re.search(r"HGMMA\S* R\d+, R\d+, gdesc", text) is not None
    return {first + n for n in range(2 if left_in_registers else 0, 4)}


def _execute(text: str, known: set[int]) -> None:
    """Changes the set of the registers that are set as an instruction does."""
    text = PREDICATE.sub("", text)
    if FORGETS.match(text):
        known.clear()
    if WRITERS.match(text) and (written := UNIFORM.search(text)):
        wide = ".64" in text.split()[0] or ".WIDE" in text.split()[0]
        known |= {int(written[1]) + n for n in range(2 if wide else 1)}
