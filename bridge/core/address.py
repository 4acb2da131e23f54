"""Free ports, and configuration types for hosts and URLs that reject malformed values."""

import errno
import ipaddress
import random
import re
import socket
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator

PORTS = range(20000, 32768)
"""Ports to draw from: below Linux's default range for outgoing connections (`net.ipv4.ip_local_port_range`)."""
_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(\.(?!-)[A-Za-z0-9_-]{1,63})*\.?")


def _host(text: str) -> str:
    if not _is_host(text):
        raise ValueError("must be a host name or an address without a port, such as 127.0.0.1")
    return text


def _urls(text: str) -> str:
    if not all(_is_url(part.strip()) for part in text.split(",")):
        raise ValueError("must be a URL such as http://127.0.0.1:8000")
    return text


Host = Annotated[str, AfterValidator(_host)]
"""Host name or IP address."""
Urls = Annotated[str, AfterValidator(_urls)]
"""One or more server URLs, separated by commas."""


def free_port(host: str) -> int:
    """Return a port that nothing listens on, and that no outgoing connection takes before the server binds it."""
    draw = random.SystemRandom()  # processes that start at the same time should not pick the same port
    for port in draw.sample(PORTS, len(PORTS)):
        try:
            with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
                return port
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise OSError(errno.EADDRINUSE, f"all ports from {PORTS.start} to {PORTS.stop - 1} of {host} are in use")


def _is_host(text: str) -> bool:
    try:
        ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        try:
            return _NAME.fullmatch(text.encode("idna").decode()) is not None
        except UnicodeError:
            return False
    return True


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in {"http", "https"} and _is_host(parts.hostname or "") and parts.port != 0
    except ValueError:  # an invalid port, or brackets around something other than an address
        return False
