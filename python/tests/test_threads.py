"""Threads of one program, and finalizers that use the package."""

import subprocess
import sys
import threading

import hmem


def finishes(program):
    """Runs a program, which a deadlock would keep from ending."""
    start = """
import sys, threading
import hmem, numpy

domain = hmem.Hmem(providers=["loopback"]).domain("loopback")
local, remote = domain.register(bytearray(64)), domain.register(bytearray(64))
endpoint = domain.endpoint()
peer = endpoint.connect(endpoint.name)
"""
    subprocess.run([sys.executable, "-P", "-c", start + program], check=True, timeout=60)


def test_other_threads_run_during_a_wait():
    with hmem.Hmem(providers=["loopback"]).domain("loopback") as domain:
        with domain.endpoint() as endpoint:
            ran = threading.Event()
            thread = threading.Thread(target=ran.set)
            interval = sys.getswitchinterval()
            # The interpreter itself makes no thread yield within the test.
            sys.setswitchinterval(60)
            try:
                thread.start()
                assert endpoint.wait(timeout=1) == []
                assert ran.is_set()
            finally:
                sys.setswitchinterval(interval)
            thread.join()


def test_threads_share_an_endpoint_whose_transfers_fail():
    finishes("""
read_only = domain.register(bytes(64))
sys.setswitchinterval(1e-6)
done = threading.Event()

def post():
    while not done.is_set():
        try:
            endpoint.write(peer, local, read_only.key)
        except hmem.Error as error:
            assert error.kind == "again", error
        try:
            endpoint.close()
        except hmem.Error as error:
            assert error.kind == "busy", error

thread = threading.Thread(target=post)
endpoint.write(peer, local, read_only.key)
endpoint.write(peer, local, read_only.key)
thread.start()
failed = 0
while failed < 500:
    try:
        endpoint.wait()
    except hmem.Error as error:
        failed += error.kind == "access-denied"
done.set()
thread.join()
""")


def test_finalizer_of_a_registered_object_may_use_the_endpoint():
    finishes("""
class Owner:
    def __init__(self, array):
        self.__array_interface__, self.array = array.__array_interface__, array

    def __del__(self):
        ran.append(endpoint.wait(0))

ran = []
region = domain.register(numpy.asarray(Owner(numpy.zeros(64, numpy.uint8))))
transfer = endpoint.write(peer, region, remote.key)
del region
assert ran == []
assert endpoint.wait(timeout=10) == [transfer]
assert ran == [[]]
""")
