"""Runs the Triton kernels of the noise in Triton's interpreter, which has to be asked for before Triton is imported.

    TRITON_INTERPRET=1 python chacha_worker.py FILE

``test_chacha.py`` starts it and looks at what it leaves in the file.
"""

import struct
import sys

import numpy as np
import torch

VECTORS = {
    "2.3.2": (
        bytes(range(32)),
        1,
        bytes.fromhex("000000090000004a00000000"),
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4ed2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e",
    ),
    "A.1 #1": (
        bytes(32),
        0,
        bytes(12),
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586",
    ),
    "A.1 #2": (
        bytes(32),
        1,
        bytes(12),
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f",
    ),
    "A.1 #3": (
        bytes(31) + b"\1",
        1,
        bytes(12),
        "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a8eca00bbb4a73bdad192b5c42f73f2fd4e273644c8b36125a64addeb006c13a0",
    ),
    "A.1 #4": (
        b"\0\xff" + bytes(30),
        2,
        bytes(12),
        "72d54dfbf12ec44b362692df94137f328fea8da73990265ec1bbbea1ae9af0ca13b25aa26cb4a648cb9b9d1be65b2c0924a66c54d545ec1b7374f4872e99f096",
    ),
    "A.1 #5": (
        bytes(32),
        0,
        bytes(11) + b"\2",
        "c2c64d378cd536374ae204b9ef933fcd1a8b2288b3dfa49672ab765b54ee27c78a970e0e955c14f3a88e741b97c286f75f8fc299e8148362fa198a39531bed6d",
    ),
}
"""Key, counter, nonce and keystream of RFC 8439, by section."""

DRAWS = {
    "one": (b"\xff" * 32, 1, torch.float64, 128),
    "a group and a number": (bytes(range(32)), 8 * 16 + 1, torch.float64, 16),
    "single precision": (bytes(range(7, 39)), 3 * 8 * 16 - 3, torch.float32, 16),
    "many": (b"\x80" + bytes(30) + b"\x01", 100_000, torch.float64, 16_384),
}
"""Key, count, dtype and lanes of normal numbers."""


def counter_and_nonce(counter, nonce):
    """The RFC's counter of 32 bits and nonce of 96 as our counter of 64 bits and nonce of two words."""
    first, *others = struct.unpack("<3I", nonce)
    return counter | first << 32, others


def main(path):
    from dp_microadam.noise import chacha_kernel
    from dp_microadam.noise.device_noise import key_words

    found = {}
    for section, (key, counter, nonce, _) in VECTORS.items():
        number, others = counter_and_nonce(counter, nonce)
        words = torch.empty(2 * 16, dtype=torch.int32)
        signed = np.array(others, dtype=np.uint32).view(np.int32).tolist()
        chacha_kernel.write_blocks[(1,)](words, number, *key_words(key), *signed, lanes=2)
        found[section] = words.numpy().tobytes()
    for name, (key, count, dtype, lanes) in DRAWS.items():
        # What lies behind the last number must stay as it is.
        out = torch.full((count + 40,), 99.0, dtype=dtype)
        grid = (-(-count // (8 * lanes)),)
        chacha_kernel.write_normals[grid](out, count, *key_words(key), lanes=lanes, enable_fp_fusion=False)
        found[name] = out
    torch.save(found, path)


if __name__ == "__main__":
    main(sys.argv[1])
