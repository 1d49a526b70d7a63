"""URLs of engines' servers, checked alike whatever the engine."""

from __future__ import annotations

from urllib.parse import urlsplit


def without_userinfo(url: str) -> str:
    """``url`` as it may be shown: what stands before an ``@`` may be a password."""
    scheme, found, rest = url.partition("://")
    authority, slash, path = rest.partition("/")
    return f"{scheme}://…@{authority.rpartition('@')[2]}{slash}{path}" if found and "@" in authority else url


def problem_of(url: str, *, prefix: bool = False) -> str | None:
    """Why ``url`` does not name a server, such as ``http://127.0.0.1:8000``; None if it does.

    Args:
        prefix: the server's endpoints may lie under a path.
    """
    shown = repr(without_userinfo(url))
    try:
        parts = urlsplit(url)
    except ValueError as error:
        return f"{shown} is no url: {error}"
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        return f"{shown} is no url of a server, such as http://127.0.0.1:8000"
    try:
        port = parts.port
    except ValueError as error:
        return f"{shown}: {error}"
    if port == 0:
        return f"{shown}: nothing listens at port 0"
    if parts.username is not None:
        return f"{shown} carries a user and a password, which would be printed; take them out of the url"
    if parts.query or parts.fragment or (parts.path.strip("/") and not prefix):
        return f"{shown} has a path; name the server alone: {parts.scheme}://{parts.netloc}"
    if url != url.strip() or not url.isprintable():
        return f"{shown} holds characters that no url has"
    return None
