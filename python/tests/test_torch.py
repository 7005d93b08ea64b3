"""Tensors of torch and of tvm-ffi, which export by the C functions of their types."""

import hmem
import pytest


@pytest.fixture(params=[False, True], ids=["uncached", "cached"])
def domain(request):
    with hmem.Hmem(providers=["loopback"]).domain("loopback", cache=request.param) as domain:
        yield domain


def test_tensors_of_tvm_ffi_are_registered(domain):
    """DOOR-05."""
    numpy = pytest.importorskip("numpy")
    tvm_ffi = pytest.importorskip("tvm_ffi", reason="tvm-ffi is not installed")
    array = numpy.arange(100, dtype=numpy.int64)
    tensor = tvm_ffi.from_dlpack(array)
    assert hasattr(type(tensor), "__dlpack_c_exchange_api__")
    with domain.register(tensor) as region:
        assert region.nbytes == 800
        assert region.address == array.ctypes.data


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
