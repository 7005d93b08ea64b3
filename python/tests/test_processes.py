"""A KV cache whose blocks move between two processes, over libfabric's tcp provider."""

import os
import random
import subprocess
import sys

import hmem
import numpy
import pytest

PROVIDER = "libfabric/tcp;ofi_rxm"
BLOCKS, BLOCK = 64, 16384

# The peer: it exposes its cache, executes transfers, and prints the blocks that changed.
PEER = f"""
import sys, threading
import hmem, numpy

domain = hmem.Hmem(providers=[{PROVIDER!r}]).domain("libfabric")
cache = numpy.arange({BLOCKS}, dtype=numpy.uint8).repeat({BLOCK})
with domain, domain.register(cache) as region, domain.endpoint() as endpoint:
    print(endpoint.name.hex(), region.key.hex(), flush=True)
    done = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.readline(), done.set())).start()
    while not done.is_set():
        endpoint.wait(timeout=0.001)
    print(*cache.reshape({BLOCKS}, {BLOCK}).min(axis=1), flush=True)
"""


def test_blocks_of_a_kv_cache_move_between_processes():
    """DOOR-05."""
    if "HMEM_LIBFABRIC_LIBRARY" not in os.environ:
        pytest.skip("HMEM_LIBFABRIC_LIBRARY names no library")
    peer = subprocess.Popen(
        [sys.executable, "-P", "-c", PEER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        name, key = (bytes.fromhex(word) for word in peer.stdout.readline().split())
        cache = numpy.zeros((BLOCKS, BLOCK), dtype=numpy.uint8)
        blocks = list(range(BLOCKS))
        random.Random(1).shuffle(blocks)
        read, written = blocks[: BLOCKS // 2], blocks[BLOCKS // 2 :]
        cache[written] = 200
        domain = hmem.Hmem(providers=[PROVIDER]).domain("libfabric")
        with domain, domain.register(cache) as region, domain.endpoint() as endpoint:
            to = endpoint.connect(name)
            transfers = set()
            for block in blocks:
                at = block * BLOCK
                post = endpoint.read if block in read else endpoint.write
                transfers.add(post(to, region, key, offset=at, remote_offset=at, length=BLOCK))
            assert set(endpoint.wait(len(blocks), timeout=60)) == transfers
        peer.stdin.write("done\n")
        peer.stdin.flush()
        changed = [int(word) for word in peer.stdout.readline().split()]
        assert changed == [200 if block in written else block for block in range(BLOCKS)]
        for block in read:
            assert (cache[block] == block).all()
        assert peer.wait(timeout=30) == 0
    finally:
        peer.kill()
