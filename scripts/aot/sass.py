"""Reads `nvdisasm -c`: instructions, basic blocks, loops, what a turn of the main loop costs."""

import collections
import dataclasses
import re

_SECTION = re.compile(r"^\s*\.section\s+\.text\.([\w$.]+)", re.MULTILINE)
_LABEL = re.compile(r"^(\.L\w+):")
_INSTRUCTION = re.compile(
    r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:\{\s*)?(@!?U?P[T\d]\s+)?([A-Z][\w.]*)\s*(.*?)\s*;"
)
_TARGET = re.compile(r"`\((\.L\w+)\)")

TENSOR_CORE = re.compile(r"^(HMMA|IMMA|QMMA|OMMA|DMMA|HGMMA|IGMMA|QGMMA|UTC\w*MMA)\b")
BULK_COPY = re.compile(r"^(UBLKCP|UTMALDG)\b")
_CLASSES = {
    "global_loads": r"^(LDG|LDGSTS)\b",
    "loads_16b": r"^(LDG|LDGSTS)\b.*\.128\b",
    "async_16b": r"^LDGSTS\b.*\.128\b",
    "bulk_copies": BULK_COPY.pattern,
    "bulk_stores": r"^(UTMASTG|UTMAREDG|UBLKRED)\b",
    "global_stores": r"^STG\b",
    "stores_16b": r"^STG\b.*\.128\b",
    "hmma": r"^(HMMA|IMMA|QMMA|OMMA|DMMA)\b",
    "hgmma": r"^(HGMMA|IGMMA|QGMMA)\b",
    "utcmma": r"^UTC\w*MMA\b",
    "shared_loads": r"^(LDS|LDSM)\b",
    "shared_stores": r"^(STS|STSM)\b",
    "local": r"^(LDL|STL)\b",
    "barriers": r"^BAR\b",
    "shuffles": r"^SHFL\b",
    "exp2": r"^MUFU\.EX2\b",
}
_PATTERNS = {name: re.compile(pattern) for name, pattern in _CLASSES.items()}
_ENDS = re.compile(r"^(EXIT|RET|BRX|JMX|KILL|BPT)\b")
_BRANCH = re.compile(r"^(BRA|JMP)\b")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Instruction:
    """One SASS instruction."""

    address: int
    predicate: str
    opcode: str  # with its modifiers: LDG.E.128
    operands: str

    @property
    def target(self) -> str | None:
        """The label that a branch goes to."""
        if not _BRANCH.match(self.opcode):
            return None
        match = _TARGET.search(self.operands)
        return match.group(1) if match else None

    @property
    def falls_through(self) -> bool:
        """Whether the next instruction may follow."""
        if _ENDS.match(self.opcode):
            return bool(self.predicate)
        if self.target is None:
            return True
        # `BRA.U !UP0, ...`, `BRA.DIV ~URZ, ...`: a condition among the operands.
        return bool(self.predicate) or "," in self.operands


@dataclasses.dataclass(slots=True)
class BasicBlock:
    """A run of instructions that is entered at its first and left at its last."""

    instructions: list[Instruction] = dataclasses.field(default_factory=list)
    successors: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loop:
    """A natural loop: `blocks` are indices of basic blocks, the header first."""

    header: int
    blocks: frozenset[int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopCost:
    """Instructions of one turn of a loop.

    Attributes:
        hot: on the path that issues most tensor-core instructions, then most copies, and then
            has fewest instructions: what a turn costs when no side block runs.
        body: in all blocks of the loop, side blocks and retries of barrier waits included.
        counts: instruction classes of the hot path, as `count_classes`.
        mma_macs: multiply-accumulates of the hot path's tensor-core instructions, as issued by one
            warp (warpgroup instructions: a quarter of theirs).
        mma_columns: least n of the hot path's warpgroup instructions, 0 without any.
        wait_depth: groups of asynchronous copies (LDGSTS) that may still be under way when the
            path has waited (`DEPBAR.LE SB0, n`, the least n); None where it never waits so.
    """

    hot: int
    body: int
    counts: dict[str, int]
    mma_macs: int
    mma_columns: int
    wait_depth: int | None


def split_kernels(text: str) -> dict[str, str]:
    """The text of each kernel in a disassembled cubin, by name."""
    starts = [(match.group(1), match.start()) for match in _SECTION.finditer(text)]
    ends = [start for _, start in starts[1:]] + [len(text)]
    return {name: text[start:end] for (name, start), end in zip(starts, ends, strict=True)}


def parse_blocks(text: str) -> list[BasicBlock]:
    """The control-flow graph of one kernel; block 0 is the entry.

    A call returns to the instruction after it, and a wait for reconvergence (BSYNC) goes on there.
    """
    blocks, of_label = [BasicBlock()], {}
    for line in text.splitlines():
        if label := _LABEL.match(line):
            if blocks[-1].instructions:
                blocks.append(BasicBlock())
            of_label[label.group(1)] = len(blocks) - 1
        elif found := _INSTRUCTION.match(line):
            address, predicate, opcode, operands = found.groups()
            instruction = Instruction(
                address=int(address, 16),
                predicate=(predicate or "").strip(),
                opcode=opcode,
                operands=operands,
            )
            blocks[-1].instructions.append(instruction)
            if instruction.target is not None or _ENDS.match(opcode):
                blocks.append(BasicBlock())
    for index, block in enumerate(blocks):
        last = block.instructions[-1] if block.instructions else None
        if last is not None and last.target in of_label:
            block.successors.append(of_label[last.target])
        if (last is None or last.falls_through) and index + 1 < len(blocks):
            block.successors.append(index + 1)
    return blocks


def all_instructions(blocks: list[BasicBlock]) -> list[Instruction]:
    """Every instruction but the padding after the last exit: a branch to itself, and NOPs."""
    everything = []
    for index, block in enumerate(blocks):
        if not (len(block.instructions) == 1 and block.successors == [index]):
            everything += block.instructions
    while everything and everything[-1].opcode == "NOP":
        everything.pop()
    return everything


def count_classes(instructions: list[Instruction]) -> dict[str, int]:
    """How many instructions there are of each class that the report knows; zeros left out."""
    counts = collections.Counter()
    for instruction in instructions:
        for name, pattern in _PATTERNS.items():
            if pattern.match(instruction.opcode):
                counts[name] += 1
    return dict(sorted(counts.items()))


def mma_macs(instruction: Instruction) -> int:
    """Multiply-accumulates that one warp issues with a tensor-core instruction, 0 if unknown.

    Warp instructions name m16n8k16 as 16816, warpgroup ones as 64x8x16 for four warps.
    """
    if not TENSOR_CORE.match(instruction.opcode):
        return 0
    if found := re.search(r"\.(\d+)x(\d+)x(\d+)", instruction.opcode):
        m, n, k = map(int, found.groups())
        return m * n * k // 4
    found = re.search(r"\.16(8)(4|8|16|32|64|128|256)\b", instruction.opcode)
    return 16 * int(found.group(1)) * int(found.group(2)) if found else 0


def find_loops(blocks: list[BasicBlock]) -> list[Loop]:
    """All natural loops; back edges to one header make one loop (Aho et al., section 9.6)."""
    dominators = _dominators(blocks)
    predecessors = _predecessors(blocks)
    found: dict[int, set[int]] = {}
    for tail, block in enumerate(blocks):
        for header in block.successors:
            if header not in dominators[tail]:
                continue
            body = found.setdefault(header, {header})
            waiting = [tail]
            while waiting:
                index = waiting.pop()
                if index not in body:
                    body.add(index)
                    waiting.extend(p for p in predecessors[index] if dominators[p])
    return [Loop(header=header, blocks=frozenset(body)) for header, body in found.items()]


def main_loop(blocks: list[BasicBlock]) -> Loop | None:
    """The innermost loop with most tensor-core instructions (without any: most FFMA and loads)."""

    def weigh(loop: Loop) -> tuple[int, int]:
        instructions = [x for index in loop.blocks for x in blocks[index].instructions]
        tensor = sum(bool(TENSOR_CORE.match(x.opcode)) for x in instructions)
        other = sum(bool(re.match(r"^(FFMA2?|HFMA2|LDG|LDGSTS)\b", x.opcode)) for x in instructions)
        return tensor, other

    loops = [loop for loop in find_loops(blocks) if any(weigh(loop))]
    inner = [
        loop
        for loop in loops
        if not any(
            other.blocks < loop.blocks
            and any(weigh(other))
            and weigh(other)[0] * 2 >= weigh(loop)[0]
            for other in loops
        )
    ]
    return max(inner, key=lambda loop: (*weigh(loop), -min(loop.blocks)), default=None)


def loop_cost(blocks: list[BasicBlock], loop: Loop) -> LoopCost:
    """What one turn costs: a best path from the header round to it, by dynamic programming."""
    order = [index for index in _reverse_postorder(blocks, loop) if index in loop.blocks]
    rank = {index: at for at, index in enumerate(order)}
    predecessors = _predecessors(blocks)
    best: dict[int, tuple[tuple[int, int, int], int | None]] = {}
    for index in order:
        own = _weight(blocks[index])
        before = [p for p in predecessors[index] if p in best and rank[p] < rank[index]]
        if index == loop.header:
            best[index] = (own, None)
        elif before:
            source = min(before, key=lambda p: best[p][0])
            best[index] = (_add(best[source][0], own), source)
    tails = [index for index in best if loop.header in blocks[index].successors]
    at: int | None = min(tails, key=lambda index: best[index][0])
    path = []
    while at is not None:
        path.append(at)
        at = best[at][1]
    hot = [x for index in reversed(path) for x in blocks[index].instructions]
    return LoopCost(
        hot=len(hot),
        body=sum(len(blocks[index].instructions) for index in loop.blocks),
        counts=count_classes(hot),
        mma_macs=sum(map(mma_macs, hot)),
        mma_columns=min(map(_warpgroup_columns, filter(_is_warpgroup_mma, hot)), default=0),
        wait_depth=min((n for n in map(_wait_depth, hot) if n is not None), default=None),
    )


def _is_warpgroup_mma(instruction: Instruction) -> bool:
    return bool(re.match(r"^[HIQ]GMMA\.\d+x\d+x\d+", instruction.opcode))


def _warpgroup_columns(instruction: Instruction) -> int:
    return int(instruction.opcode.split(".")[1].split("x")[1])


def _wait_depth(instruction: Instruction) -> int | None:
    if not instruction.opcode.startswith("DEPBAR"):
        return None
    found = re.search(r"SB0, (0x[0-9a-f]+)", instruction.operands)
    return int(found.group(1), 16) if found else None


def _weight(block: BasicBlock) -> tuple[int, int, int]:
    names = [x.opcode for x in block.instructions]
    tensor = sum(bool(TENSOR_CORE.match(name)) for name in names)
    copies = sum(bool(re.match(r"^(LDGSTS|UBLKCP|UTMALDG)\b", name)) for name in names)
    return -tensor, -copies, len(names)


def _add(x: tuple[int, int, int], y: tuple[int, int, int]) -> tuple[int, int, int]:
    return x[0] + y[0], x[1] + y[1], x[2] + y[2]


def _predecessors(blocks: list[BasicBlock]) -> list[list[int]]:
    predecessors: list[list[int]] = [[] for _ in blocks]
    for index, block in enumerate(blocks):
        for successor in block.successors:
            predecessors[successor].append(index)
    return predecessors


def _reverse_postorder(blocks: list[BasicBlock], loop: Loop | None = None) -> list[int]:
    """Blocks in an order where, back edges aside, each follows its predecessors."""
    start = 0 if loop is None else loop.header
    seen, order = {start}, []
    stack = [(start, iter(blocks[start].successors))]
    while stack:
        index, successors = stack[-1]
        for successor in successors:
            if successor not in seen and (loop is None or successor in loop.blocks):
                seen.add(successor)
                stack.append((successor, iter(blocks[successor].successors)))
                break
        else:
            order.append(index)
            stack.pop()
    return order[::-1]


def _dominators(blocks: list[BasicBlock]) -> list[set[int]]:
    """For each block the blocks that every way to it passes; empty where none leads there."""
    order = _reverse_postorder(blocks)
    predecessors = _predecessors(blocks)
    dominators: list[set[int]] = [set() for _ in blocks]
    dominators[0] = {0}
    changed = True
    while changed:
        changed = False
        for index in order[1:]:
            known = [dominators[p] for p in predecessors[index] if dominators[p]]
            new = set.intersection(*known) | {index} if known else {index}
            if new != dominators[index]:
                dominators[index], changed = new, True
    return dominators
