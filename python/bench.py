"""Measures the package beside NIXL's wheel, if that is installed, in the same run.

    pip install --no-deps nixl-cu12==1.5.1
    python -P python/bench.py

Prints times, and the ratios of hmem's time to NIXL's. hmem registers with the software NIC, and
NIXL with its UCX back end.
"""

import importlib.metadata
import os
import subprocess
import sys
import time

import hmem
import numpy

SIZE = 1 << 20


def import_time(statement):
    """Returns the seconds of an import in a new interpreter, in the fastest of 15."""
    clock = "time.perf_counter()"
    program = f"import time; start = {clock}; {statement}; print({clock} - start)"
    command = [sys.executable, "-P", "-c", program]
    runs = [subprocess.run(command, check=True, capture_output=True) for _ in range(15)]
    return min(float(run.stdout) for run in runs)


def per_call(function, calls=1000):
    """Returns the seconds of one call, in the fastest of 100 rounds."""
    function()
    rounds = []
    for _ in range(100):
        start = time.perf_counter()
        for _ in range(calls):
            function()
        rounds.append((time.perf_counter() - start) / calls)
    return min(rounds)


def installed_bytes(package):
    files = importlib.metadata.files(package)
    return sum(os.stat(file.locate()).st_size for file in files if "__pycache__" not in str(file))


class Tensor:
    """An array that speaks DLPack alone."""

    def __init__(self, array):
        self.__dlpack__, self.__dlpack_device__ = array.__dlpack__, array.__dlpack_device__


def hmem_figures():
    array = numpy.zeros(SIZE, dtype=numpy.uint8)
    provider = hmem.Hmem(providers=["loopback"])
    figures = {"import": import_time("import hmem"), "installed": installed_bytes("hmem")}
    with provider.domain("loopback") as domain:
        figures["register and close"] = per_call(lambda: domain.register(array).close())
    with provider.domain("loopback", cache=True) as domain:
        figures["cached: register and close"] = per_call(lambda: domain.register(array).close())
        tensor = Tensor(array)
        figures["cached, by __dlpack__"] = per_call(lambda: domain.register(tensor).close())
    return figures


def nixl_figures():
    from nixl_cu12._api import nixl_agent, nixl_agent_config

    agent = nixl_agent("bench", nixl_agent_config(backends=["UCX"]))
    array = numpy.zeros(SIZE, dtype=numpy.uint8)
    descriptor = [(array.ctypes.data, SIZE, 0, "")]

    def register():
        agent.deregister_memory(agent.register_memory(descriptor, "DRAM"))

    return {
        "import": import_time("import nixl_cu12._api"),
        "installed": installed_bytes("nixl-cu12"),
        "register and close": per_call(register, 300),
    }


def text(name, value):
    return f"{value / 1e6:.1f} MB" if name == "installed" else f"{value * 1e6:.2f} us"


def main():
    ours = hmem_figures()
    try:
        theirs = nixl_figures()
    except ImportError as error:
        print(f"NIXL is not measured: {error}")
        theirs = {}
    for name, value in ours.items():
        # NIXL has no cache of registrations: the same call registers again.
        other = "register and close" if name.startswith("cached") else name
        line = f"{name}: {text(name, value)}"
        if other in theirs:
            line += f", NIXL {text(other, theirs[other])}, ratio {value / theirs[other]:.3f}"
        print(line)


if __name__ == "__main__":
    main()
