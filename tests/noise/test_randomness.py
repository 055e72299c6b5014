"""Randomness: enough entropy, no trace of it, repeatable only when asked. False-alarm rates are below 1e-6 per test."""

import copy
import multiprocessing
import os
import pickle

import numpy as np
import pytest
import torch
from scipy import stats

from dp_microadam import InputError, PrivacyError
from dp_microadam.noise import randomness as module
from dp_microadam.noise.randomness import Randomness

SOURCES = [
    pytest.param(lambda: Randomness.from_entropy(), id="statistical"),
    pytest.param(lambda: Randomness.from_entropy(secure=True), id="secure"),
]


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("distance", [2**32, 2**48, 2**62])
def test_runs_whose_32_bit_seeds_would_collide_differ(secure, distance):
    one, other = (Randomness.seeded(seed, secure=secure) for seed in (1, 1 + distance))
    assert not torch.equal(one.normals("noise", 0, 8), other.normals("noise", 0, 8))
    assert not np.array_equal(one.uniforms("sampling", 0, 8), other.uniforms("sampling", 0, 8))


@pytest.mark.parametrize("secure", [False, True])
def test_every_bit_of_the_operating_systems_entropy_reaches_the_noise(monkeypatch, secure):
    """Two runs whose entropy differs in any single one of 256 bits draw different noise."""
    drawn = set()
    for bit in [None, *range(256)]:
        entropy = (0 if bit is None else 1 << bit).to_bytes(32, "little")
        monkeypatch.setattr(os, "urandom", lambda count, entropy=entropy: entropy[:count])
        drawn.add(tuple(Randomness.from_entropy(secure=secure).normals("noise", 0, 4, torch.float64).tolist()))
    assert len(drawn) == 257


@pytest.mark.parametrize("make", SOURCES)
def test_two_runs_and_two_draws_differ(make):
    one, other = make(), make()
    first = one.normals("noise", 0, 100)
    assert not torch.equal(first, other.normals("noise", 0, 100))
    assert not torch.equal(first, one.normals("noise", 0, 100)), "a repeated draw must not repeat the noise"
    assert not torch.equal(one.normals("noise", 1, 100), one.normals("noise", 2, 100))


@pytest.mark.parametrize("secure", [False, True])
def test_a_seed_repeats_every_draw_in_any_order(secure):
    one, other = Randomness.seeded(5, secure=secure), Randomness.seeded(5, secure=secure)
    forward = [one.normals("noise", step, 70_000) for step in range(3)]
    backward = [other.normals("noise", step, 70_000) for step in reversed(range(3))]
    assert all(torch.equal(a, b) for a, b in zip(forward, reversed(backward), strict=True))
    assert not torch.equal(forward[0], forward[1])
    assert not torch.equal(forward[0], one.normals("other", 0, 70_000))


def test_seeded_noise_does_not_depend_on_the_number_of_threads(monkeypatch):
    many = Randomness.seeded(5).normals("noise", 0, 300_001)
    monkeypatch.setattr(module, "_THREADS", 1)
    assert torch.equal(many, Randomness.seeded(5).normals("noise", 0, 300_001))


@pytest.mark.parametrize("make", SOURCES)
def test_randomness_is_neither_saved_nor_copied_nor_shown(make, tmp_path):
    source = make()
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy, lambda it: torch.save(it, tmp_path / "file")):
        with pytest.raises(PrivacyError, match="cannot be saved or copied"):
            attempt(source)
    assert source._secret.hex() not in repr(source)
    assert str(source._secret) not in repr(source)
    assert not set(repr(source).replace("AES-256", "")) & set("0123456789"), "no number but the cipher's name"


def _draw_in_child(source, results):
    try:
        source.normals("noise", 0, 4)
        results.put("drew")
    except PrivacyError as refusal:
        results.put(str(refusal))


def test_a_forked_process_does_not_repeat_its_parents_noise():
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=_draw_in_child, args=(Randomness.from_entropy(), results))
    child.start()
    answer = results.get(timeout=60)
    child.join()
    assert "cannot be shared with a forked process" in answer


def test_only_a_seed_makes_a_source_not_private():
    assert Randomness.from_entropy().private
    assert Randomness.from_entropy(secure=True).private
    assert not Randomness.seeded(0).private
    assert "not private" in Randomness.seeded(0).description
    with pytest.raises(InputError, match="seed is -1"):
        Randomness.seeded(-1)


# Each statistical test accepts p-values above 5e-8, and makes at most ten comparisons per source.
ALARM = 5e-8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("make", SOURCES)
def test_normals_have_the_normal_distribution(make, dtype):
    count = 1_000_000
    drawn = make().normals("noise", 0, count, dtype).double().numpy()
    assert stats.kstest(drawn, "norm").pvalue > ALARM
    bound = stats.norm.isf(ALARM / 2)
    # The first four moments 0, 1, 0, 3, and the variances of their estimates, 1, 2, 15 and 96 over the count.
    for power, (moment, variance) in enumerate([(0, 1), (1, 2), (0, 15), (3, 96)], start=1):
        assert abs((drawn**power).mean() - moment) < bound * np.sqrt(variance / count), power


@pytest.mark.parametrize("rounds", [1, 2, 31])
@pytest.mark.parametrize(("secure", "generator"), [(False, "_statistical_bits"), (True, "_aes_bits")])
def test_the_noise_has_tails_as_far_out_as_accountants_look(monkeypatch, secure, generator, rounds):
    """Noise that ends somewhere has δ beyond that whatever ε is, and no accountant knows of it.

    Random words of the radii are replaced by those of the rarest radii, with probability 2⁻³² in each round: after 31 rounds
    all numbers of a block lie beyond 37 deviations. Half the squared radius then is an exponential number again.
    """
    original, left = getattr(module, generator), [rounds]

    def rarest(key, count):
        words = original(key, count)
        if left[0]:
            half = count // 2 if left[0] == rounds else count
            words = np.concatenate([words[:half] | np.uint64(0xFFFFFFFF00000000), words[half:]])
            left[0] -= 1
        return words

    monkeypatch.setattr(module, generator, rarest)
    drawn = Randomness.from_entropy(secure=secure).normals("noise", 0, module._BLOCK, torch.float64).numpy()
    exponential = (drawn**2).reshape(2, -1).sum(0) / 2 - rounds * 32 * np.log(2)
    assert exponential.min() > -1e-9
    assert stats.kstest(exponential, "expon").pvalue > ALARM
    assert rounds < 31 or np.sqrt(2 * (exponential + rounds * 32 * np.log(2))).min() > 37


@pytest.mark.parametrize("make", SOURCES)
def test_noise_is_independent_between_steps_tensors_and_neighbours(make):
    count = 500_000
    source = make()
    a, b = source.normals("a", 0, count, torch.float64), source.normals("a", 1, count, torch.float64)
    c = source.normals("b", 0, count, torch.float64)
    half = module._BLOCK // 2  # cosines and sines of one block come from the same radii
    bound = stats.norm.isf(ALARM / 2) / np.sqrt(count - half)
    for x, y in [(a, b), (a, c), (a[:-1], a[1:]), (a[:-half], a[half:])]:
        for f in (lambda v: v, lambda v: (v**2 - 1) / np.sqrt(2)):
            assert abs(float((f(x) * f(y)).mean())) < bound


@pytest.mark.parametrize("make", SOURCES)
def test_uniforms_are_uniform_with_53_bits(make):
    drawn = make().uniforms("sampling", 0, 1_000_000)
    assert stats.kstest(drawn, "uniform").pvalue > ALARM
    assert 0 <= drawn.min() < drawn.max() < 1
    lowest_bit = (drawn * 2**53).astype(np.uint64) & np.uint64(1)
    assert stats.binomtest(int(lowest_bit.sum()), len(drawn), 0.5).pvalue > ALARM


def test_the_secure_stream_is_aes_in_counter_mode():
    """Against the definition: each block of the stream is the encryption of its number."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    key = bytes(range(32))
    encrypt = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
    blocks = b"".join(encrypt.update(counter.to_bytes(16, "big")) for counter in range(3))
    assert module._aes_bits(key, 6).tobytes() == blocks


def test_randomness_with_a_secret_from_elsewhere_is_refused():
    with pytest.raises(PrivacyError, match="secret from elsewhere"):
        Randomness(b"x" * 32, secure=False, seed=None)
