"""Addresses of TCP."""

from __future__ import annotations

import pytest

from quire.cluster.transport.stream import TransportError


@pytest.mark.parametrize(
    ("place", "found"),
    [
        ("127.0.0.1", ("127.0.0.1", 0)), ("10.0.0.1:4711", ("10.0.0.1", 4711)), ("::1", ("::1", 0)),
        ("[::1]", ("::1", 0)), ("[fe80::1]:80", ("fe80::1", 80)), ("node-3.example:65535", ("node-3.example", 65535)),
        ("::", ("::", 0)),
    ],
)  # fmt: skip
def test_hosts_may_have_ports(place: str, found: tuple[str, int]) -> None:
    from quire.cluster.transport.tcp import _split

    assert _split(place) == found


@pytest.mark.parametrize("place", ["", ":80", "host:", "host:x", "host:65536", "[::1", "[a]b", "127.0.0.1:-1"])
def test_what_is_no_host_is_refused(place: str) -> None:
    from quire.cluster.transport.tcp import _split

    with pytest.raises(TransportError, match="is no host with a port"):
        _split(place)
