"""What one store knows of single objects: which it vouches for, and which are of no use to it.

That an object is there says little where some cannot be read: with encryption it may be plain,
or under a key that is gone. So a store that encrypts, or has met an object that it cannot read,
vouches only for what it wrote or read itself since it was made. Of both kinds a bounded number is
known; of more the oldest is forgotten, which costs a write or a read in vain.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from kvkeep.backends.header import HeaderProblem
from kvkeep.types import Fingerprint, Namespace, ObjectKey

KNOWN_MOST = 1 << 16  # of each kind

_Name = tuple[Namespace, ObjectKey]


class Known:
    """Objects by name. `is_doubtful`: from the start only what was seen is vouched for."""

    def __init__(self, *, is_doubtful: bool) -> None:
        self.met: Counter[HeaderProblem] = Counter()  # unreadable ones, ever
        self._is_doubtful = is_doubtful
        self._of_no_use: dict[_Name, HeaderProblem] = {}
        self._sure: dict[_Name, None] = {}  # last used last

    def good(self, space: Namespace, key: ObjectKey) -> None:
        """It was written or read just now, and is right."""
        self._of_no_use.pop((space, key), None)
        if self._is_doubtful:
            self._sure.pop((space, key), None)
            self._sure[space, key] = None
            _bound(self._sure)

    def unreadable(self, space: Namespace, key: ObjectKey, why: HeaderProblem) -> None:
        """It is there and of no use, until it is written anew."""
        self.met[why] += 1
        self._is_doubtful = True
        self._sure.pop((space, key), None)
        self._of_no_use[space, key] = why
        _bound(self._of_no_use)

    def gone(self, space: Namespace, keys: Iterable[ObjectKey]) -> None:
        """Nothing is known of these any more."""
        if self._of_no_use or self._sure:
            for key in keys:
                self._of_no_use.pop((space, key), None)
                self._sure.pop((space, key), None)

    def forget(self, fingerprint: Fingerprint) -> None:
        """Nor of anything of this layout."""
        for known in (self._of_no_use, self._sure):
            for name in [name for name in known if name[0].fingerprint == fingerprint]:
                del known[name]

    def of_use(
        self, space: Namespace, keys: Sequence[ObjectKey], there: Sequence[bool]
    ) -> Sequence[bool]:
        """Without what is known to be unreadable: it is no hit, and may be written anew."""
        if not self._of_no_use:
            return there
        for key, is_there in zip(keys, there, strict=True):
            if not is_there:  # evicted, say
                self._of_no_use.pop((space, key), None)
        pairs = zip(keys, there, strict=True)
        return [is_there and (space, key) not in self._of_no_use for key, is_there in pairs]

    def vouched(
        self, space: Namespace, keys: Sequence[ObjectKey], there: Sequence[bool]
    ) -> Sequence[bool]:
        """Those of use that need not be written again."""
        if not self._is_doubtful:
            return there
        return [
            is_there and self._is_sure(space, key)
            for key, is_there in zip(keys, there, strict=True)
        ]

    def unreadable_now(self) -> dict[str, int]:
        """How many are there and of no use, by why."""
        return {str(why): n for why, n in sorted(Counter(self._of_no_use.values()).items())}

    def _is_sure(self, space: Namespace, key: ObjectKey) -> bool:
        name = space, key
        if name not in self._sure:
            return False
        del self._sure[name]
        self._sure[name] = None
        return True


def _bound(known: dict[_Name, HeaderProblem] | dict[_Name, None]) -> None:
    if len(known) > KNOWN_MOST:
        del known[next(iter(known))]
