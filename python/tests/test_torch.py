"""Tensors of torch, and of a type that exports them by C functions as torch does."""

import ctypes
import sys

import hmem
import numpy
import pytest


@pytest.fixture(params=[False, True], ids=["uncached", "cached"])
def domain(request):
    with hmem.Hmem(providers=["loopback"]).domain("loopback", cache=request.param) as domain:
        yield domain


class Version(ctypes.Structure):
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32)]


Export = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(ctypes.c_void_p))


class ExchangeApi(ctypes.Structure):
    """`DLPackExchangeAPI`, without the functions at its end."""

    _fields_ = [
        ("version", Version),
        ("previous", ctypes.c_void_p),
        ("allocate", ctypes.c_void_p),
        ("export", Export),
    ]


# The places of members of `DLManagedTensorVersioned`.
FLAGS, BITS = 24, 53


def pointer(capsule):
    """Returns the address of the tensor in the capsule of an array."""
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype = ctypes.c_void_p
    return get(ctypes.py_object(capsule), ctypes.c_char_p(b"dltensor_versioned"))


USED = ctypes.c_char_p(b"used_dltensor_versioned")


@Export
def export(tensor, out):
    tensor.exports += 1
    capsule = tensor.array.__dlpack__(max_version=(1, 0))
    out[0] = pointer(capsule)
    ctypes.pythonapi.PyCapsule_SetName(ctypes.py_object(capsule), USED)
    return 0


def exchange(version, previous=None):
    api = ExchangeApi(Version(version, 3), previous and ctypes.addressof(previous), None, export)
    make = ctypes.pythonapi.PyCapsule_New
    make.restype = ctypes.py_object
    # The name lives as long as the capsule.
    return api, make(ctypes.byref(api), EXCHANGE, None)


EXCHANGE = ctypes.c_char_p(b"dlpack_exchange_api")
CURRENT, CAPSULE = exchange(1)
_LATER, CAPSULE_OF_LATER_VERSION = exchange(2, previous=CURRENT)


@pytest.mark.parametrize("capsule", [CAPSULE, CAPSULE_OF_LATER_VERSION])
def test_tensors_are_exported_by_the_c_functions_of_their_type(domain, capsule):
    """DOOR-05."""

    class Tensor:
        __dlpack_c_exchange_api__ = capsule
        exports = 0

    array = numpy.arange(100, dtype=numpy.int64)
    tensor = Tensor()
    tensor.array = array
    references = sys.getrefcount(array)
    region = domain.register(tensor)
    assert tensor.exports == 1
    assert region.address == array.__array_interface__["data"][0]
    assert region.nbytes == 800
    assert sys.getrefcount(array) > references
    region.close()
    assert sys.getrefcount(array) == references


@pytest.mark.parametrize(("padded", "size"), [(False, 50), (True, 100)])
def test_elements_of_half_a_byte_are_packed_unless_the_tensor_pads_them(domain, padded, size):
    """DOOR-05."""

    class Tensor:
        def __dlpack_device__(self):
            return (1, 0)

        def __dlpack__(self, **_options):
            capsule = numpy.zeros(100, numpy.uint8).__dlpack__(max_version=(1, 0))
            tensor = pointer(capsule)
            flags = ctypes.c_uint64.from_address(tensor + FLAGS)
            flags.value |= 4 if padded else 0
            ctypes.c_uint8.from_address(tensor + BITS).value = 4
            return capsule

    with domain.register(Tensor()) as region:
        assert region.nbytes == size


def test_tensors_of_torch_are_registered(domain):
    """DOOR-05, DOOR-06."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    source, target = torch.arange(1000), torch.zeros(1000, dtype=torch.int64)
    with domain.register(source) as local, domain.register(target) as remote:
        with domain.endpoint() as endpoint:
            endpoint.write(endpoint.connect(endpoint.name), local, remote.key)
            assert len(endpoint.wait(timeout=10)) == 1
    assert torch.equal(source, target)
    with pytest.raises(hmem.Error, match="not contiguous"):
        domain.register(torch.zeros(8, 8).t())
    gone = torch.zeros(1000)
    gone.untyped_storage().resize_(0)
    with pytest.raises(hmem.Error):
        domain.register(gone)
    parameter = torch.nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))
    with domain.register(parameter) as region:
        assert (region.address, region.nbytes) == (parameter.data_ptr(), 2000)
    with pytest.raises(hmem.Error, match="does not hand out its memory") as refused:
        domain.register(torch.zeros(8, device="meta"))
    # torch's own message goes on with a stack of C++ functions.
    assert "\n" not in str(refused.value)
    assert "\n" in str(refused.value.__cause__)
