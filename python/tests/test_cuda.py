"""The CUDA array interface and DLPack, over a fake driver that HMEM_CUDA_LIBRARY names."""

import ctypes
import os

import hmem
import pytest

LIBRARY = os.environ.get("HMEM_CUDA_LIBRARY")

if LIBRARY is None:
    pytest.skip("HMEM_CUDA_LIBRARY names no driver library", allow_module_level=True)


class Driver:
    def __init__(self):
        self.library = ctypes.CDLL(LIBRARY)
        self.call("cuInit", 0)
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.call("cuCtxSetCurrent", context)

    def call(self, name, *arguments):
        assert getattr(self.library, name)(*arguments) == 0, name

    def allocate(self, size):
        pointer = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
        return pointer.value

    def free(self, pointer):
        self.call("cuMemFree_v2", ctypes.c_uint64(pointer))

    def bytes(self, pointer, size):
        out = ctypes.create_string_buffer(size)
        to = ctypes.c_uint64(ctypes.addressof(out))
        self.call("cuMemcpy", to, ctypes.c_uint64(pointer), ctypes.c_size_t(size))
        return out.raw


class Array:
    def __init__(self, pointer, shape, typestr="<f4", read_only=False, **other):
        self.__cuda_array_interface__ = {
            "data": (pointer, read_only),
            "shape": shape,
            "typestr": typestr,
            "version": 3,
            **other,
        }


@pytest.fixture(scope="module")
def driver():
    return Driver()


@pytest.fixture
def memory(driver):
    pointer = driver.allocate(1 << 21)
    yield pointer
    driver.free(pointer)


@pytest.fixture(params=[False, True], ids=["uncached", "cached"])
def domain(request):
    with hmem.Hmem(providers=["loopback"]).domain("loopback", cache=request.param) as domain:
        yield domain


def test_cuda_arrays_are_registered_by_dma_buf(domain, driver, memory):
    """DOOR-05."""
    data = bytes(range(256)) * 16
    with domain.register(Array(memory, (32, 32))) as region, domain.register(data) as source:
        assert region.decision["iface"] == "cuda"
        assert region.decision["path"] == "dma-buf"
        assert region.nbytes == 4096
        with domain.endpoint() as endpoint:
            endpoint.write(endpoint.connect(endpoint.name), source, region.key)
            assert len(endpoint.wait(timeout=10)) == 1
    assert driver.bytes(memory, 4096) == data


def test_array_is_held_while_it_is_registered(domain, memory):
    """DOOR-05."""
    import gc
    import weakref

    array = Array(memory, (64,))
    alive = weakref.ref(array)
    region = domain.register(array)
    del array
    gc.collect()
    assert alive() is not None
    region.close()
    del region
    assert alive() is None


@pytest.mark.parametrize(
    ("array", "reason"),
    [
        (dict(shape=(8, 8), strides=(64, 4)), "not contiguous"),
        (dict(shape=(8,), strides=(3,)), "not contiguous"),
        (dict(shape=(8,), strides=(5,)), "not contiguous"),
        (dict(shape=(8,), mask=object()), "mask"),
        (dict(shape=(8,), typestr="nonsense"), "type"),
        (dict(shape=(-1,)), "impossible"),
        (dict(shape=(8,), data=None), "does not hand out its memory"),
    ],
)
def test_arrays_that_cannot_be_described_are_refused(domain, memory, array, reason):
    """DOOR-06."""
    with pytest.raises(hmem.Error, match=reason):
        domain.register(Array(memory, **array))


def test_strides_of_a_contiguous_array_are_accepted(domain, memory):
    domain.register(Array(memory, (8, 4), strides=(16, 4))).close()


@pytest.mark.parametrize(("element", "size"), [("|V300", 300), ("<M8[ns]", 8), ("|b1", 1)])
def test_size_of_an_element_is_that_of_its_type(domain, memory, element, size):
    """DOOR-05."""
    with domain.register(Array(memory, (4,), element)) as region:
        assert region.nbytes == 4 * size


def test_read_only_array_gives_peers_only_reads(domain, memory):
    """DOOR-06."""
    array = Array(memory, (8,), read_only=True)
    with pytest.raises(hmem.Error, match="read-only"):
        domain.register(array, hmem.REMOTE_WRITE)
    domain.register(array).close()


def test_freed_and_foreign_memory_is_refused(domain, driver):
    """DOOR-06."""
    pointer = driver.allocate(1 << 21)
    domain.register(Array(pointer, (8,))).close()
    driver.free(pointer)
    with pytest.raises(hmem.Error) as raised:
        domain.register(Array(pointer, (8,)))
    assert raised.value.remedy
    # Memory of the host that claims to be CUDA's.
    host = bytearray(4096)
    address = ctypes.addressof(ctypes.c_char.from_buffer(host))
    with pytest.raises(hmem.Error, match="cuda"):
        domain.register(Array(address, (8,)))
    with pytest.raises(hmem.Error, match="freed"):
        domain.register(Array(0, (8,)))


def test_cached_region_of_freed_memory_is_invalid_and_not_found_again(driver):
    """DOOR-06."""
    with hmem.Hmem(providers=["loopback"]).domain("loopback", cache=True) as domain:
        pointer = driver.allocate(1 << 21)
        region = domain.register(Array(pointer, (8,)))
        driver.free(pointer)
        assert not region.valid
        again = driver.allocate(1 << 21)
        assert again == pointer, "the driver reuses the address"
        with domain.register(Array(again, (8,))) as current:
            assert current.valid and current.key != region.key
        region.close()
        driver.free(again)
