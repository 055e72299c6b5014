"""The random source of sampling and noise.

Each draw has its own generator, keyed by a cryptographic hash of a 256-bit secret and of a label: the purpose, the step,
the tensor's name, the block of coordinates. In a private run the secret comes from the operating system and is kept in
memory only. In a test run it is a hash of a fixed seed: every draw is then a function of (seed, step, example or
coordinate), however the work is divided, and the run is not private. ``torch.Generator`` is not used because it keeps only 32
bits of its seed on CPU and 64 on CUDA.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from dp_microadam.errors import InputError, PrivacyError
from dp_microadam.validation import require_integer

# Numbers per block. Blocks are fixed, so that the number of threads does not change what is drawn, and small enough
# that torch does not divide them further and that they stay in a core's cache.
_BLOCK = 1 << 16
_THREADS = max(1, min(8, os.cpu_count() or 1))

# Uniform numbers below this over 2⁶³, which is 2⁻³², are drawn to the end from further words.
_ROUND = 1 << 31

Words = NDArray[np.uint64]

_OWN_CLASS_METHODS = object()


class Randomness:
    """The random source of sampling and noise: the operating system's entropy, or a fixed seed for tests.

    It cannot be pickled, copied or printed, and refuses to work in a forked process.

    Formal guarantees: from :meth:`from_entropy`, every draw is keyed by 256 bits of the operating system's entropy
    and no two draws of a process share a key: it is a hash of the secret, the step, the number of the draw, its purpose and the
    block of coordinates. Ranks and resumed runs have secrets of their own. With ``secure`` the draws are AES-256 in counter
    mode, indistinguishable from random bits for anyone without the key; without ``secure`` they come from SFC64, a statistical
    generator of 192 bits of state with no such claim. Normal numbers are computed in double and have no bound: if the bits are
    random, P(|z| > x) is right to a relative error below 2⁻³⁰ for every x up to 37, the farthest that accountants look.

    >>> Randomness.seeded(7)
    Randomness(fixed seed 7: not private)
    >>> Randomness.from_entropy()
    Randomness(operating system's entropy, statistical generator)
    """

    def __init__(self, secret: bytes, *, secure: bool, seed: int | None, made_by: object = None) -> None:
        if made_by is not _OWN_CLASS_METHODS:
            raise PrivacyError(
                "Randomness was made with a secret from elsewhere; use Randomness.from_entropy(), or Randomness.seeded(seed) "
                "in tests, which know whether it is private"
            )
        self._secret = secret
        self._process = os.getpid()
        self._draws = 0
        self._lock = threading.Lock()
        self._seed = seed
        self.secure = secure
        if secure and find_spec("cryptography") is None:
            raise InputError("secure is True; it needs the package cryptography (pip install 'dp-microadam[secure]')")

    @classmethod
    def from_entropy(cls, *, secure: bool = False) -> Randomness:
        """Fresh randomness for one private run; a resumed run creates a new one."""
        return cls(os.urandom(32), secure=secure, seed=None, made_by=_OWN_CLASS_METHODS)

    @classmethod
    def seeded(cls, seed: int, *, secure: bool = False) -> Randomness:
        """Repeatable randomness, for tests only: whoever guesses the seed can subtract the noise."""
        require_integer("seed", seed, 0)
        return cls(hashlib.sha256(b"seed %d" % seed).digest(), secure=secure, seed=seed, made_by=_OWN_CLASS_METHODS)

    @property
    def private(self) -> bool:
        """Whether a run that uses this source can be private."""
        return self._seed is None

    @property
    def description(self) -> str:
        """The source in words, for the privacy statement; it reveals nothing about what is drawn."""
        if not self.private:
            return f"fixed seed {self._seed}: not private"
        generator = "AES-256 in counter mode" if self.secure else "statistical generator"
        return f"operating system's entropy, {generator}"

    def uniforms(self, purpose: str, step: int, count: int, *, first: int = 0) -> NDArray[np.float64]:
        """``count`` independent uniform numbers in [0, 1), each a multiple of 2⁻⁵³, starting at index ``first``.

        With a fixed seed, a number depends on its index alone, not on where the request begins or ends.
        """
        label = self._label(purpose, step)
        end = first + count
        blocks = [
            _uniforms(self._bits(label, block, min(_BLOCK, end - block * _BLOCK)))
            for block in range(first // _BLOCK, math.ceil(end / _BLOCK))
        ]
        return np.concatenate(blocks)[first % _BLOCK :] if count else np.empty(0)

    def normals(self, purpose: str, step: int, count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """``count`` independent standard normal numbers on the CPU, drawn in float64 and rounded to ``dtype``."""
        out = torch.empty(count, dtype=dtype)
        self.fill_normals({purpose: out}, step)
        return out

    def fill_normals(self, parts: Mapping[str, torch.Tensor], step: int) -> None:
        """Fill flat tensors on the CPU with standard normal numbers, by purpose."""
        work = []
        for purpose, numbers in parts.items():
            label = self._label(purpose, step)
            work += [(part, label, block) for block, part in enumerate(numbers.split(_BLOCK)) if len(part)]

        def fill(task: tuple[torch.Tensor, bytes, int]) -> None:
            part, label, block = task
            rounds = itertools.count()
            part.copy_(_normals(lambda count: self._bits(label, block, count, next(rounds)), len(part)))

        # Starting threads takes longer than drawing a block, whatever the number of tensors it is for.
        if sum(map(len, parts.values())) <= _BLOCK or _THREADS == 1:
            for task in work:
                fill(task)
        else:
            with ThreadPoolExecutor(min(_THREADS, len(work))) as pool:
                list(pool.map(fill, work))

    def _label(self, purpose: str, step: int) -> bytes:
        if self._process != os.getpid():
            raise PrivacyError("randomness cannot be shared with a forked process; make a new one there")
        draw = 0
        if self.private:  # even a repeated request gets new numbers
            with self._lock:
                self._draws += 1
                draw = self._draws
        return f"{step}\0{draw}\0{purpose}".encode()

    def _bits(self, label: bytes, block: int, count: int, draw: int = 0) -> Words:
        """Random words of a block of numbers: those of draw number 0, and of further ones where few numbers need more."""
        place = b"%d+%d" % (block, draw) if draw else b"%d" % block
        key = hashlib.blake2b(place + b"\0" + label, key=self._secret, digest_size=32).digest()
        return _aes_bits(key, count) if self.secure else _statistical_bits(key, count)

    def __repr__(self) -> str:
        return f"Randomness({self.description})"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise PrivacyError("randomness cannot be saved or copied, because its secret would outlive the run")


def _statistical_bits(key: bytes, count: int) -> Words:
    # A pool of eight words keeps all 256 bits of the key; SFC64 uses 192 of them as its state.
    sequence = np.random.SeedSequence(int.from_bytes(key, "little"), pool_size=8)
    return np.random.SFC64(sequence).random_raw(count)


def _aes_bits(key: bytes, count: int) -> Words:
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    return np.frombuffer(stream.update(bytes(8 * count)), dtype="<u8").astype(np.uint64, copy=False)


def _uniforms(words: Words) -> NDArray[np.float64]:
    return (words >> np.uint64(11)).view(np.int64).astype(np.float64) * 2.0**-53  # signed integers become double faster


def _normals(draw: Callable[[int], Words], count: int) -> torch.Tensor:
    """Independent standard normal numbers, by Box–Muller: radii from the first half of the words, angles from the second."""
    half = (count + 1) // 2
    words = draw(2 * half)
    radius = _logarithms(words[:half], draw).mul_(-2).sqrt_()
    angle = torch.from_numpy(_uniforms(words[half:])).mul_(2 * math.pi)
    return torch.cat([torch.cos(angle).mul_(radius), angle.sin_().mul_(radius)])[:count]


def _logarithms(words: Words, draw: Callable[[int], Words]) -> torch.Tensor:
    """The logarithms of independent uniform numbers, one from each word, and from further words where it is small.

    A word alone would end at 63·log(1/2), and the noise at 9.3 standard deviations. But an exponential distribution has no
    memory: below 32·log(1/2) it is that much and another such number. So where the first 32 bits of a word are ones, with
    probability 2⁻³², a new word goes on from there, and every uniform number has 31 random bits below its leading one.
    """
    numbers = (~words >> np.uint64(1)).view(np.int64)  # u times 2⁶³
    found = torch.from_numpy(numbers * 2.0**-63).log_()
    if numbers.min(initial=_ROUND) < _ROUND:
        small = np.flatnonzero(numbers < _ROUND)
        found[small] = _logarithms(draw(len(small)), draw) - 32 * math.log(2)
    return found
