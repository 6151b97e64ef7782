"""Writes tests/fuzz/corpus: what every target starts from, one file an input.

    python -m tests.fuzz.make_corpus

Files that are there and not made here are past findings: they stay, and the tests run them too.
"""

from pathlib import Path

from kvkeep.testing.fuzz import SUFFIX, TARGETS, open_target

CORPUS = Path(__file__).parent / "corpus"


def main() -> None:
    """Write or replace what the targets themselves propose."""
    for name in TARGETS:
        target = open_target(name)
        folder = CORPUS / name
        folder.mkdir(parents=True, exist_ok=True)
        for title, data in target.seeds().items():
            (folder / f"{title}{SUFFIX}").write_bytes(data)
        target.close()


if __name__ == "__main__":
    main()
