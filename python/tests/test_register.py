"""Registration of buffers and DLPack tensors, over the software NIC."""

import ctypes
import gc
import mmap
import sys
import threading
import weakref

import hmem
import numpy
import pytest


@pytest.fixture(params=[False, True], ids=["uncached", "cached"])
def domain(request):
    with hmem.Hmem(providers=["loopback"]).domain("loopback", cache=request.param) as domain:
        yield domain


def refused(domain, thing, reason, **arguments):
    with pytest.raises(hmem.Error, match=reason) as raised:
        domain.register(thing, **arguments)
    assert raised.value.remedy
    return raised.value


def copied(domain, source, target):
    """Moves the bytes of one object to another by the NIC."""
    with domain.register(source) as local, domain.register(target) as remote:
        with domain.endpoint() as endpoint:
            peer = endpoint.connect(endpoint.name)
            transfer = endpoint.write(peer, local, remote.key)
            assert endpoint.wait(timeout=10) == [transfer]


def test_buffers_are_registered_and_hold_the_bytes_of_transfers(domain):
    """DOOR-05."""
    source = numpy.arange(1000, dtype=numpy.int32).reshape(10, 100)
    for target in [numpy.zeros_like(source), bytearray(4000), memoryview(bytearray(4000))]:
        copied(domain, source, target)
        assert bytes(target) == source.tobytes()


def test_arrays_of_ctypes_are_registered(domain):
    """DOOR-05."""
    source, target = (ctypes.c_int32 * 100)(*range(100)), (ctypes.c_int32 * 100)()
    copied(domain, source, target)
    assert list(target) == list(range(100))
    # The buffer of the region is released with it.
    alive = weakref.ref(target)
    del target
    assert alive() is None


def test_only_references_are_refused_as_elements(domain):
    """DOOR-06."""
    domain.register(numpy.zeros(4, [("Offset", "i4"), ("O", [("O", "f8")])])).close()
    for kind in [[("at", "i4"), ("value", "O")], [("at", [("value", "O")])]]:
        refused(domain, numpy.zeros(4, kind), "references to Python objects")


def test_region_has_a_key_a_decision_and_its_place(domain):
    """DOOR-05."""
    array = numpy.zeros(512)
    with domain.register(array) as region:
        assert isinstance(region.key, bytes) and region.key
        assert region.decision["path"] and region.decision["reason"]
        assert region.address == array.ctypes.data
        assert region.nbytes == array.nbytes
        assert region.valid
        assert region.access & hmem.REMOTE_WRITE
    with pytest.raises(hmem.Error, match="was closed"):
        region.key


def test_buffer_is_held_while_it_is_registered(domain):
    """DOOR-05."""
    buffer = bytearray(4096)
    region = domain.register(buffer)
    with pytest.raises(BufferError):
        buffer.append(0)
    region.close()
    region.close()
    buffer.append(0)

    array = numpy.zeros(4096)
    alive = weakref.ref(array)
    region = domain.register(array)
    del array
    gc.collect()
    assert alive() is not None
    del region
    gc.collect()
    assert alive() is None


class Tensor:
    """The DLPack side of an array, in the versions of the protocol."""

    def __init__(self, array, versions):
        self.array, self.versions, self.capsules = array, versions, []

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, **options):
        if not self.versions and "max_version" in options:
            raise TypeError("unexpected keyword argument 'max_version'")
        capsule = self.array.__dlpack__(**options)
        self.capsules.append(capsule)
        return capsule


@pytest.mark.parametrize("versions", [False, True])
def test_dlpack_tensors_are_registered_and_released(domain, versions):
    """DOOR-05."""
    source = numpy.arange(500, dtype=numpy.float64)
    target = numpy.zeros_like(source)
    references = sys.getrefcount(target)
    tensor = Tensor(target, versions)
    copied(domain, source, tensor)
    assert (target == source).all()
    name = "used_dltensor_versioned" if versions else "used_dltensor"
    assert f'"{name}"' in repr(tensor.capsules[0])
    del tensor
    gc.collect()
    assert sys.getrefcount(target) == references

    tensor = Tensor(target, versions)
    region = domain.register(tensor)
    del tensor
    gc.collect()
    assert sys.getrefcount(target) > references
    region.close()
    assert sys.getrefcount(target) == references


def test_tensor_of_a_refused_call_is_released(domain):
    """DOOR-05."""
    array = numpy.zeros((4, 4))
    references = sys.getrefcount(array)
    error = refused(domain, Tensor(array[:, 1:3], True), "not contiguous")
    assert "strides" in str(error)
    # A traceback holds the tensor.
    del error
    gc.collect()
    assert sys.getrefcount(array) == references


def test_objects_that_are_not_contiguous_are_refused(domain):
    """DOOR-06."""
    array = numpy.zeros((8, 8))
    for view in [array[:, :4], array[::2], array.T, numpy.asfortranarray(array)]:
        refused(domain, view, "not contiguous.*strides")
        refused(domain, Tensor(view, True), "not contiguous.*strides")
    domain.register(array[2:4]).close()
    # A dimension of one element has no stride that counts.
    domain.register(array[:1, :4]).close()
    domain.register(Tensor(array[:1, :4], True)).close()


def test_read_only_objects_give_peers_only_reads(domain):
    """DOOR-06."""
    array = numpy.zeros(512)
    array.flags.writeable = False
    for thing in [array, Tensor(array, True), bytes(4096)]:
        error = refused(domain, thing, "read-only", access=hmem.REMOTE_WRITE)
        assert error.kind == "access-denied"
        refused(domain, thing, "read-only", access=hmem.READ)
        with domain.register(thing) as region:
            assert not region.access & (hmem.REMOTE_WRITE | hmem.READ | hmem.RECV)


def test_cache_gives_a_read_only_object_no_key_of_a_writable_one():
    """DOOR-06."""
    with hmem.Hmem(providers=["loopback"]).domain("loopback", cache=True) as domain:
        array = numpy.zeros(4096)
        domain.register(array).close()
        array.flags.writeable = False
        with domain.register(numpy.ones(4096)) as other, domain.register(array) as region:
            assert not region.access & (hmem.REMOTE_WRITE | hmem.READ | hmem.RECV)
            with domain.endpoint() as endpoint:
                peer = endpoint.connect(endpoint.name)
                with pytest.raises(hmem.Error, match="only read"):
                    endpoint.read(peer, region, other.key)
                endpoint.write(peer, other, region.key)
                with pytest.raises(hmem.Error, match="REMOTE_WRITE"):
                    endpoint.wait(timeout=10)
        assert not array.any()


def test_freed_and_foreign_objects_are_refused(domain):
    """DOOR-06."""
    released = memoryview(bytearray(64))
    released.release()
    refused(domain, released, "released memoryview")
    closed = mmap.mmap(-1, 4096)
    closed.close()
    refused(domain, closed, "closed")
    refused(domain, object(), "no memory that can be found")
    refused(domain, numpy.array([object()]), "references to Python objects")
    refused(domain, bytearray(), "length|empty|zero")
    refused(domain, bytearray(8), "bits of no right", access=1 << 60)

    class Deleted:
        def __dlpack_device__(self):
            return (1, 0)

        def __dlpack__(self, **_options):
            raise RuntimeError("the array was deleted\nframe #0: a stack of C++ functions")

    error = refused(domain, Deleted(), "the array was deleted")
    assert "frame" not in str(error)
    assert isinstance(error.__cause__, RuntimeError)


def test_all_or_none_of_several_objects_are_registered(domain):
    arrays = [numpy.zeros(100) for _ in range(8)]
    with pytest.raises(hmem.Error) as raised:
        domain.register_many([*arrays, arrays[0][::2]])
    assert raised.value.index == len(arrays)
    raised = None
    gc.collect()
    regions = domain.register_many(arrays)
    assert [region.nbytes for region in regions] == [800] * 8
    for region in regions:
        region.close()


def test_domain_with_open_regions_is_not_closed():
    domain = hmem.Hmem(providers=["loopback"]).domain("loopback")
    region = domain.register(bytearray(64))
    with pytest.raises(hmem.Error) as raised:
        domain.close()
    assert raised.value.kind == "busy"
    region.close()
    domain.close()


def test_region_of_a_transfer_in_flight_is_not_closed(domain):
    local, remote = domain.register(bytearray(64)), domain.register(bytearray(64))
    with domain.endpoint() as endpoint:
        transfer = endpoint.write(endpoint.connect(endpoint.name), local, remote.key)
        with pytest.raises(hmem.Error, match="in flight"):
            local.close()
        with pytest.raises(hmem.Error, match="in flight"):
            endpoint.close()
        assert endpoint.wait(timeout=10) == [transfer]
        local.close()
    remote.close()


def test_failed_transfer_raises_its_error(domain):
    with domain.register(bytearray(64)) as local, domain.endpoint() as endpoint:
        peer = endpoint.connect(endpoint.name)
        with domain.register(bytes(64)) as read_only:
            transfer = endpoint.write(peer, local, read_only.key)
            with pytest.raises(hmem.Error) as raised:
                endpoint.wait(timeout=10)
        assert raised.value.transfer == transfer
        assert endpoint.wait(timeout=0) == []


def test_timeout_may_be_longer_than_any_duration(domain):
    with domain.register(bytearray(64)) as local, domain.endpoint() as endpoint:
        peer = endpoint.connect(endpoint.name)
        for timeout in [float("inf"), 1e20]:
            transfer = endpoint.write(peer, local, local.key)
            assert endpoint.wait(timeout=timeout) == [transfer]


def test_failed_transfer_ends_a_wait_for_more(domain):
    with domain.register(bytearray(64)) as local, domain.endpoint() as endpoint:
        peer = endpoint.connect(endpoint.name)
        with domain.register(bytes(64)) as read_only:
            transfer = endpoint.write(peer, local, read_only.key)
            with pytest.raises(hmem.Error) as raised:
                endpoint.wait(4)
        assert raised.value.transfer == transfer


def test_repeated_registration_is_one_region_of_the_cache():
    """DOOR-05."""
    with hmem.Hmem(providers=["loopback"]).domain("loopback", cache=True) as domain:
        array = numpy.zeros(1 << 16)
        keys = set()
        for _ in range(10):
            with domain.register(array) as region:
                keys.add(region.key)
        assert len(keys) == 1
