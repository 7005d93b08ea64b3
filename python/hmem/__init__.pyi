from typing import Any, Sequence

from typing_extensions import Buffer, Self

COLLECTIVE: int
READ: int
"""The region may be the destination of this program's reads."""
WRITE: int
"""The region may be the source of this program's writes."""
RECV: int
SEND: int
REMOTE_READ: int
"""Peers may read the region."""
REMOTE_WRITE: int
"""Peers may write the region and apply atomics to it."""
MW_BIND: int
REMOTE_ATOMIC: int
REMOTE_RMA_WRITE: int

class Error(RuntimeError):
    """A failure. `str` of it has the reason and the remedy on one line."""

    kind: str | None
    """The kind in kebab case, such as `access-denied`. None if a subcommand could not run."""
    message: str
    remedy: str | None
    summary: dict[str, Any] | None
    """All facts: operation, error numbers, iface, device, NIC, context and attempts."""
    transfer: int
    """The number of the failed transfer. Only `Endpoint.wait` sets it."""
    index: int
    """The position of the refused object. Only `Domain.register_many` sets it."""

class Report(dict[str, Any]):
    """The JSON document of a subcommand."""

    passed: bool
    """True if the command returns 0."""

def info(*, nic: str | None = None) -> Report:
    """Returns the document of `hmem info --json`.

    NICs of libfabric are listed only if no other thread runs in the process, because libfabric
    reads environment variables. This holds for `check` and `explain` too.
    """

def check(
    *,
    iface: str | None = None,
    nic: str | None = None,
    path: str | None = None,
    bytes: int | None = None,
    quick: bool = False,
) -> Report:
    """Returns the document of `hmem check --json`."""

def explain(
    *,
    iface: str | None = None,
    device: int | None = None,
    nic: str | None = None,
    size: int | None = None,
    policy: str | None = None,
    pointer: str | None = None,
) -> Report:
    """Returns the document of `hmem explain --json`."""

class Hmem:
    """The memory ifaces and NICs of a program."""

    def __init__(self, *, providers: Sequence[str] = ("verbs",)) -> None:
        """Starts providers: `verbs`, `libfabric`, `libfabric/PROVIDER`, and `loopback`, the
        software NIC.

        An absent library is no error: `absent` has the reason, and `domain` raises it.

        With libfabric's software providers (`tcp`, `shm`), close a region only after the peers have
        ended their transfers: these providers finish a transfer that has begun. No thread of
        another language may change the environment during this call.
        """

    def nics(self) -> list[str]:
        """Returns the names of the NICs, as `domain` takes them."""

    @property
    def absent(self) -> dict[str, str]:
        """The ifaces, providers and NICs that are absent, with the reasons."""

    def domain(self, nic: str, *, cache: bool = False) -> Domain:
        """Opens a NIC: `PROVIDER/NIC`, or `PROVIDER` for its first NIC.

        With a cache, a region stays registered after it is closed, until its memory is unmapped or
        the cache needs room. A later registration of the same memory is then a lookup. Peers that
        keep a key can access the memory as long, even if the program uses it for other objects. So
        use a cache only with peers that forget the keys of closed regions.
        """

class Domain:
    """An open NIC. A context manager, whose end closes it."""

    @property
    def nic(self) -> str: ...
    def register(self, object: Buffer | Any, access: int | None = None) -> Region:
        """Registers the memory of an object with the buffer protocol, `__dlpack__` or
        `__cuda_array_interface__`, and holds it until the region is closed.

        `access` is a combination of rights. None means all rights of transfers that the object
        allows: a read-only object gets no right to write.

        Raises Error, with the reason, for an object that is not contiguous in the order of C, that
        was freed, that is empty, or whose memory is not that of the device it names; and for rights
        to write to a read-only object.
        """

    def register_many(
        self, objects: Sequence[Buffer | Any], access: int | None = None
    ) -> list[Region]:
        """Registers several objects: all, or none."""

    def endpoint(self, depth: int = 128) -> Endpoint:
        """Opens an endpoint for up to `depth` transfers at once."""

    def progress(self) -> int:
        """Executes transfers of peers, for NICs that need the program for it."""

    def close(self) -> None:
        """Closes the NIC. Raises Error while a region or an endpoint is open."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *exception: object) -> None: ...

class Region:
    """Registered memory. A context manager, whose end closes it."""

    @property
    def key(self) -> bytes:
        """The remote key, to send to peers."""

    @property
    def decision(self) -> dict[str, Any]:
        """The path of the registration, the reason for it, and each attempt."""

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def access(self) -> int:
        """The rights. A cached region may have more than the call asked for."""

    @property
    def valid(self) -> bool:
        """False once the memory of a cached region was unmapped or freed. Always true without a
        cache.
        """

    def close(self) -> None:
        """Deregisters the memory, or returns the region to the cache. Raises Error while a transfer
        of this region is in flight.
        """

    def __enter__(self) -> Self: ...
    def __exit__(self, *exception: object) -> None: ...

class Endpoint:
    """A sender of transfers. A context manager, whose end closes it."""

    @property
    def name(self) -> bytes:
        """The name, to send to peers."""

    def connect(self, name: bytes) -> int:
        """Connects to the endpoint of a peer, and returns the number of the peer."""

    def read(
        self,
        peer: int,
        region: Region,
        key: bytes,
        *,
        offset: int = 0,
        remote_offset: int = 0,
        length: int | None = None,
    ) -> int:
        """Begins to read bytes of the peer's region into a region. Returns the number of the
        transfer. None as the length means the rest of the region.
        """

    def write(
        self,
        peer: int,
        region: Region,
        key: bytes,
        *,
        offset: int = 0,
        remote_offset: int = 0,
        length: int | None = None,
    ) -> int:
        """Begins to write bytes of a region to the peer's region, like `read`."""

    def wait(self, count: int = 1, timeout: float | None = None) -> list[int]:
        """Waits until `count` transfers have completed, a transfer has failed, or `timeout` seconds
        have passed. Returns the numbers of those that completed. Also executes transfers of peers.

        Raises the Error of a failed transfer, with its number in `transfer`. Other completions are
        left to the next call.
        """

    def close(self) -> None:
        """Closes the endpoint. Raises Error while a transfer is in flight."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *exception: object) -> None: ...
