"""Text as byte tokens, held out by document, and a sampler that depends on nothing but counters."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trainer.config import DataConfig, TrainerConfig

Tokens = npt.NDArray[np.uint8]

BYTE_VOCAB = 256
DOCUMENT_END = b"\x00"
PIECE_BYTES = 8192  # a lone file is cut into documents of about this size, at line ends
PYTHON_DOCS = ("/usr/share/doc", "python3*/html/_sources/**/*.rst.txt")
MARKOV_STATES = 64
MARKOV_SUCCESSORS = 8
MARKOV_DOCUMENTS, MARKOV_DOCUMENT_BYTES = 256, 4096


class DataError(ValueError):
    """Text that cannot be read or is too short; the message is one sentence."""


@dataclass(frozen=True)
class Corpus:
    """Token streams for training and validation.

    `sha256` covers the whole source in order of document name. `entropy_floor` is the source's entropy
    in nats per token where it is known (markov), else None.
    """

    source: str
    sha256: str
    train: Tokens
    holdout: Tokens
    entropy_floor: float | None = None


def load_corpus(config: DataConfig, seed: int) -> Corpus:
    """Read the configured source and split it by document.

    A document belongs to the holdout when the hash of its text falls below `config.holdout`, so the
    split does not depend on order, on other documents or on the seed.

    Raises:
        DataError: unreadable, or too short for one window of `seq_len` + 1 tokens on either side.
    """
    entropy_floor: float | None = None
    if config.source == "pydoc-topics":
        documents = _pydoc_topics()
    elif config.source == "python-docs":
        documents = _python_docs()
    elif config.source == "markov":
        documents, entropy_floor = _markov(seed)
    else:
        documents = _local(Path(config.source))
    documents.sort()
    ranked = sorted((_share(text), text) for _, text in documents)
    # at least one document on each side, whatever the hashes say
    cut = sum(share < config.holdout for share, _ in ranked)
    cut = min(max(cut, 1), max(len(ranked) - 1, 0))
    held = {text for _, text in ranked[:cut]}
    train = _stream(text for _, text in documents if text not in held)
    holdout = _stream(text for _, text in documents if text in held)
    for name, tokens in (("training", train), ("validation", holdout)):
        if len(tokens) < config.seq_len + 1:
            raise DataError(
                f"data.source: {config.source!r} leaves {len(tokens)} tokens for {name}, "
                f"at least data.seq_len + 1 = {config.seq_len + 1} are needed"
            )
    digest = hashlib.sha256()
    for name, text in documents:
        digest.update(f"{name}\x00{len(text)}\x00".encode())
        digest.update(text)
    return Corpus(config.source, digest.hexdigest(), train, holdout, entropy_floor)


def _share(text: bytes) -> float:
    """Hash of a document as a number in [0, 1)."""
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") / 2**64


def _stream(texts: Iterable[bytes]) -> Tokens:
    return np.frombuffer(b"".join(text + DOCUMENT_END for text in texts), dtype=np.uint8)


def _pydoc_topics() -> list[tuple[str, bytes]]:
    from pydoc_data.topics import topics  # noqa: PLC0415 - half a megabyte, only where it is used

    return [(name, text.encode()) for name, text in topics.items()]


def _python_docs() -> list[tuple[str, bytes]]:
    root, pattern = PYTHON_DOCS
    paths = sorted(Path(root).glob(pattern))
    if not paths:
        raise DataError(
            f"data.source: python-docs found no {root}/{pattern}; install Debian's package python3-doc, "
            f"or use pydoc-topics"
        )
    return [(str(path.relative_to(root)), _read(path)) for path in paths]


def _local(path: Path) -> list[tuple[str, bytes]]:
    if path.is_file():
        return [(f"{index:08d}", piece) for index, piece in enumerate(_pieces(_read(path)))]
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        return [(str(file.relative_to(path)), text) for file in files if (text := _read(file))]
    raise DataError(
        f"data.source: {str(path)!r} is neither a file nor a folder, nor one of pydoc-topics, python-docs, markov"
    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"data.source: {path} cannot be read: {error.strerror or error}") from error


def _pieces(text: bytes) -> Iterator[bytes]:
    piece: list[bytes] = []
    size = 0
    for line in text.splitlines(keepends=True):
        piece.append(line)
        size += len(line)
        if size >= PIECE_BYTES:
            yield b"".join(piece)
            piece, size = [], 0
    if piece:
        yield b"".join(piece)


def _markov(seed: int) -> tuple[list[tuple[str, bytes]], float]:
    """Documents of an order-1 Markov chain, and its entropy in nats per token.

    Each of MARKOV_STATES bytes has MARKOV_SUCCESSORS successors with Dirichlet(1) probabilities.
    """
    rng = np.random.Generator(np.random.Philox(seed))
    transition = np.zeros((MARKOV_STATES, MARKOV_STATES))
    for row in transition:
        successors = rng.choice(MARKOV_STATES, MARKOV_SUCCESSORS, replace=False)
        row[successors] = rng.dirichlet(np.ones(MARKOV_SUCCESSORS))
    stationary = np.full(MARKOV_STATES, 1 / MARKOV_STATES)
    for _ in range(1000):  # power iteration on the lazy chain, which also converges if periodic
        stationary = 0.5 * stationary + 0.5 * stationary @ transition
    logs = np.log(np.where(transition > 0, transition, 1.0))
    entropy_floor = float(-(stationary[:, None] * transition * logs).sum())
    cumulative = transition.cumsum(axis=1)
    state = rng.integers(0, MARKOV_STATES, MARKOV_DOCUMENTS)
    text = np.empty((MARKOV_DOCUMENTS, MARKOV_DOCUMENT_BYTES), dtype=np.uint8)
    for position in range(MARKOV_DOCUMENT_BYTES):
        text[:, position] = state + 32
        below = cumulative[state] < rng.random(MARKOV_DOCUMENTS)[:, None]
        state = np.minimum(below.sum(axis=1), MARKOV_STATES - 1)
    return [(f"{index:04d}", row.tobytes()) for index, row in enumerate(text)], entropy_floor


class Sampler:
    """Training windows chosen by (seed, step, global sequence index), and a fixed validation set.

    The global batch of a step is the same whatever the number of replicas and stages: replica i takes
    its contiguous slice of it.
    """

    def __init__(self, corpus: Corpus, seq_len: int, seed: int) -> None:
        self.corpus = corpus
        self.seq_len = seq_len
        self.seed = seed

    def batch(self, step: int, first: int, count: int) -> Tokens:
        """Global sequences `first` .. `first + count - 1` of `step`: uint8 [count, seq_len + 1]."""
        choices = len(self.corpus.train) - self.seq_len
        starts = [self._draw(step, first + index) % choices for index in range(count)]
        return _windows(self.corpus.train, starts, self.seq_len)

    def validation(self, tokens: int, multiple_of: int = 1) -> Tokens:
        """Evenly spaced windows of the holdout, at most `tokens` tokens: uint8 [n, seq_len + 1].

        n is a multiple of `multiple_of` where the holdout allows it, and at least 1.
        """
        return _windows(self.corpus.holdout, self._validation_starts(tokens, multiple_of), self.seq_len)

    def tuning(self, tokens: int, multiple_of: int = 1) -> Tokens:
        """Windows midway between those of `validation`, sharing no byte with them: uint8 [n, seq_len + 1].

        Raises:
            DataError: the held-out text is too short for that.
        """
        starts = self._validation_starts(tokens, multiple_of)
        between = [(a + b) // 2 for a, b in itertools.pairwise(starts)]
        room = min((b - a for a, b in itertools.pairwise(starts)), default=0)
        if room < 2 * (self.seq_len + 1):
            raise DataError(
                f"eval.part: found 'tuning' with {len(self.corpus.holdout)} held-out tokens, allowed is at least "
                f"{2 * len(starts) * (self.seq_len + 1)} for {len(starts)} windows, or a smaller eval.tokens"
            )
        return _windows(
            self.corpus.holdout, between[: len(between) // multiple_of * multiple_of or None], self.seq_len
        )

    def _validation_starts(self, tokens: int, multiple_of: int) -> list[int]:
        available = (len(self.corpus.holdout) - 1) // self.seq_len
        count = max(1, min(tokens // self.seq_len, available))
        count = count // multiple_of * multiple_of or count
        span = len(self.corpus.holdout) - self.seq_len - 1
        return [span * index // max(count - 1, 1) for index in range(count)]

    def _draw(self, step: int, index: int) -> int:
        counter = f"{self.seed}:{step}:{index}".encode()
        return int.from_bytes(hashlib.blake2b(counter, digest_size=8).digest(), "big")


def evaluation_windows(corpus: Corpus, config: TrainerConfig) -> Tokens:
    """What `eval` asks for: uint8 [n, seq_len + 1].

    Raises:
        DataError: the held-out text is too short for it.
    """
    sampler = Sampler(corpus, config.data.seq_len, config.seed)
    part = sampler.tuning if config.eval.part == "tuning" else sampler.validation
    return part(config.eval.tokens, multiple_of=8)


def _windows(stream: Tokens, starts: list[int], seq_len: int) -> Tokens:
    return np.stack([stream[start : start + seq_len + 1] for start in starts])
