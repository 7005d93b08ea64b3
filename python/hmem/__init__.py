"""Registers tensors and buffers with RDMA NICs, and keeps the reason for each region's path."""

from ._hmem import (  # noqa: F401
    COLLECTIVE,
    MW_BIND,
    READ,
    RECV,
    REMOTE_ATOMIC,
    REMOTE_READ,
    REMOTE_RMA_WRITE,
    REMOTE_WRITE,
    SEND,
    WRITE,
    Domain,
    Endpoint,
    Error,
    Hmem,
    Region,
    document as _document,
)


class Report(dict):
    """The JSON document of a subcommand. `passed` is true if the command returns 0."""

    passed: bool


def _report(subcommand, options):
    import json

    words = [subcommand]
    for name, value in options.items():
        option = "--" + name.replace("_", "-")
        if value is True:
            words.append(option)
        elif value is not None and value is not False:
            words.append(f"{option}={value}")
    passed, text = _document(words)
    report = Report(json.loads(text))
    report.passed = passed
    return report


def info(**options):
    """Returns the document of `hmem info`. The options are those of the command."""
    return _report("info", options)


def check(**options):
    """Returns the document of `hmem check`. The options are those of the command."""
    return _report("check", options)


def explain(**options):
    """Returns the document of `hmem explain`. The options are those of the command."""
    return _report("explain", options)
