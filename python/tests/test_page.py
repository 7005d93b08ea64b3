"""The programs of docs/torch-tensor.md."""

import re
from pathlib import Path

import numpy
import pytest

PAGE = Path(__file__).parents[2] / "docs/torch-tensor.md"


def tensors(library):
    """Returns two tensors of 4096 bytes with different contents."""
    if library == "torch":
        torch = pytest.importorskip("torch", reason="torch is not installed")
        return torch.arange(4096).to(torch.uint8), torch.zeros(4096, dtype=torch.uint8)
    return numpy.arange(4096).astype(numpy.uint8), numpy.zeros(4096, dtype=numpy.uint8)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_programs_of_the_page_transfer_a_tensor(library):
    """DOOR-05."""
    programs = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(programs) == 2
    # The software NIC takes the place of a hardware NIC, and one process that of two.
    sent = []
    provider = 'import hmem\nprovider = hmem.Hmem(providers=["loopback"])\n'
    here = [
        program.replace("hmem.Hmem()", "provider").replace('"verbs"', '"loopback"')
        for program in programs
    ]
    shared = {"send": lambda *values: sent.extend(values), "receive": lambda: sent}
    exposed, read = tensors(library)
    first = {"tensor": exposed, **shared}
    exec(provider + here[0], first)
    exec(here[1], {"tensor": read, "provider": first["provider"], **shared})
    assert (read == exposed).all()
    for opened in ["endpoint", "region", "domain"]:
        first[opened].close()
