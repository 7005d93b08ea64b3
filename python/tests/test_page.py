"""The programs of docs/torch-tensor.md."""

import re
from pathlib import Path

import numpy

PAGE = Path(__file__).parents[2] / "docs/torch-tensor.md"


def test_programs_of_the_page_transfer_a_tensor():
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
    exposed, read = numpy.arange(4096, dtype=numpy.uint8), numpy.zeros(4096, dtype=numpy.uint8)
    first = {"tensor": exposed, **shared}
    exec(provider + here[0], first)
    exec(here[1], {"tensor": read, "provider": first["provider"], **shared})
    assert (read == exposed).all()
    for opened in ["endpoint", "region", "domain"]:
        first[opened].close()
