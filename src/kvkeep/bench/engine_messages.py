"""What the engine's process and its parent say to each other: one JSON line per message.

The parent's first line is `Start`; the child answers it with `Started`, and every line after it
with exactly one reply. End of input ends the child.
"""

import msgspec

BLOCK_TOKENS = 32  # the CPU backend takes multiples of 32 only


class Start(msgspec.Struct, tag="start", frozen=True, kw_only=True):
    """Build an engine. Without `socket` it is vLLM alone."""

    model: str
    socket: str | None = None
    dtype: str = "float32"
    max_model_len: int = 8_192


class Pieces(msgspec.Struct, tag="pieces", frozen=True):
    """Tokenize a chat prompt that puts the document first, in parts that can be joined."""

    document: str
    questions: tuple[str, ...]


class Ask(msgspec.Struct, tag="ask", frozen=True, kw_only=True):
    """One request, greedy, alone in the engine, from arrival to its last token."""

    name: str
    prompt: list[int]
    max_tokens: int
    ignore_eos: bool = False


class Reset(msgspec.Struct, tag="reset", frozen=True):
    """Empty vLLM's own prefix cache, so that what is found next comes from elsewhere."""


class Settle(msgspec.Struct, tag="settle", frozen=True):
    """Wait until kvkeep is connected in an epoch other than this one and the arena is mapped."""

    not_epoch: int = 0
    timeout_s: float = 60.0


class Started(msgspec.Struct, tag="started", frozen=True):
    """The engine takes requests."""

    versions: dict[str, str]
    vocabulary: int


class Piece(msgspec.Struct, tag="piece", frozen=True):
    """A prompt is `head + document[:n] + tails[i]`."""

    head: list[int]
    document: list[int]
    tails: list[list[int]]


class Answer(msgspec.Struct, tag="answer", frozen=True, kw_only=True):
    """What one request gave and cost; `cpu_s` is of all threads of the engine's process."""

    request: str  # vLLM's own id of it
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float
    total_s: float
    cpu_s: float
    token_ids: list[int]
    text: str


class Done(msgspec.Struct, tag="done", frozen=True):
    """It is done; `epoch` is the server's the engine is connected to, 0 for none."""

    epoch: int = 0


class Failed(msgspec.Struct, tag="failed", frozen=True):
    """It could not be done; the text says why."""

    text: str


Command = Start | Pieces | Ask | Reset | Settle
Reply = Started | Piece | Answer | Done | Failed
