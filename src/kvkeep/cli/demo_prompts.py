"""The demo's document and questions, and how much of the document goes into the prompt.

The document comes first in the chat, so that both questions share it as a prefix. It is cut where a
chunk ends: what a hit leaves to compute is then the question alone.
"""

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import kvkeep
from kvkeep.bench.engine_messages import Piece
from kvkeep.connectors.vllm.settings import DEFAULT_CHUNK_TOKENS
from kvkeep.errors import KVKeepError

QUESTIONS = (
    "What is the document above about?",
    "Name the main parts of the system described above.",
)
MIN_DOCUMENT_TOKENS = 3_000
# A CPU computes a prompt of 13 chunks in half a minute in fp32, and the demo does so four times.
MAX_CHUNKS = 13
_PACKAGED = "data/ARCHITECTURE.md"
_IN_CHECKOUT = "docs/ARCHITECTURE.md"


class DocumentUnusable(KVKeepError):
    """There is no document, or it is too short to show anything."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """One prompt per question; they share `shared_tokens`, `used_tokens` of it the document's."""

    ids: tuple[list[int], ...]
    shared_tokens: int
    document_tokens: int
    used_tokens: int


def whole_chunk_tokens(tokens: int) -> int:
    """How many of the first `tokens` tokens whole chunks cover."""
    return tokens // DEFAULT_CHUNK_TOKENS * DEFAULT_CHUNK_TOKENS


def read_document(path: Path | None) -> tuple[str, str]:
    """(where it is from, its text). Without a path: kvkeep's own ARCHITECTURE.md."""
    if path is None:
        return _own_document()
    try:
        return str(path), path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DocumentUnusable(f"cannot read the document {path}: {error}") from error


def build_prompts(piece: Piece, source: str) -> Prompts:
    """Join the parts; raises DocumentUnusable when the document is too short."""
    have = len(piece.document)
    if have < MIN_DOCUMENT_TOKENS:
        raise DocumentUnusable(
            f"the document {source} has {have} tokens; the demo needs {MIN_DOCUMENT_TOKENS} or more"
        )
    head = len(piece.head)
    used = min(have, MAX_CHUNKS * DEFAULT_CHUNK_TOKENS - head)
    cut = (head + used) // DEFAULT_CHUNK_TOKENS * DEFAULT_CHUNK_TOKENS - head
    if cut >= MIN_DOCUMENT_TOKENS:
        used = cut
    shared = piece.head + piece.document[:used]
    ids = tuple(shared + tail for tail in piece.tails)
    return Prompts(ids, len(shared), have, used)


def _own_document() -> tuple[str, str]:
    packaged = resources.files(kvkeep).joinpath(_PACKAGED)
    if packaged.is_file():
        return "ARCHITECTURE.md of kvkeep", packaged.read_text(encoding="utf-8")
    checkout = Path(kvkeep.__file__).parents[2] / _IN_CHECKOUT
    if checkout.is_file():
        return _IN_CHECKOUT, checkout.read_text(encoding="utf-8")
    raise DocumentUnusable(
        "kvkeep's own document is not in this installation: name one with --document FILE"
    )
