"""info, check and explain, and a machine without any library for RDMA."""

import json
import os
import subprocess
import sys

import hmem
import pytest


def test_info_is_the_document_of_the_command():
    """DOOR-07."""
    command = os.environ.get("HMEM_COMMAND")
    if command is None:
        pytest.skip("HMEM_COMMAND names no `hmem` command")
    for subcommand, options in [("info", {}), ("explain", {"nic": "loopback/hardware"})]:
        words = [f"--{name}={value}" for name, value in options.items()]
        printed = subprocess.run([command, subcommand, "--json", *words], capture_output=True)
        report = getattr(hmem, subcommand)(**options)
        assert report == json.loads(printed.stdout)
        assert report.passed == (printed.returncode == 0)


def test_check_verifies_host_memory_over_the_software_nic():
    """DOOR-07."""
    report = hmem.check(iface="system", nic="loopback/hardware", quick=True)
    assert report.passed
    assert report["rows"] and all(row["verified"] for row in report["rows"])


def test_explain_names_the_path():
    """DOOR-07."""
    report = hmem.explain(nic="loopback/hardware", iface="system")
    assert report.passed
    assert "plain" in json.dumps(report)


def test_unknown_options_are_refused_with_the_reason():
    with pytest.raises(hmem.Error, match="no iface named tape") as raised:
        hmem.explain(iface="tape")
    assert raised.value.kind == "invalid-argument"
    assert raised.value.remedy
    with pytest.raises(hmem.Error, match="--nonsense"):
        hmem.info(nonsense=1)


def test_absent_libraries_are_reasons_and_no_import_error():
    """DOOR-08."""
    program = """
import hmem
every = hmem.Hmem(providers=["verbs", "libfabric"])
assert "/nonexistent/" in every.absent["libfabric"], every.absent
assert "/nonexistent/" in every.absent["cuda"], every.absent
for name in {"verbs", "libfabric"} & every.absent.keys():
    try:
        every.domain(name)
    except hmem.Error as error:
        assert error.kind in ["unavailable", "unsupported"], error.kind
    else:
        raise AssertionError(name)
"""
    absent = {
        f"HMEM_{name}_LIBRARY": f"/nonexistent/{name}.so" for name in ["LIBFABRIC", "CUDA"]
    }
    command = [sys.executable, "-P", "-c", program]
    subprocess.run(command, env={**os.environ, **absent}, check=True)


def test_import_needs_no_tensor_library():
    program = "import hmem, sys; assert not {'torch', 'numpy', 'json'} & set(sys.modules)"
    subprocess.run([sys.executable, "-P", "-c", program], check=True)
