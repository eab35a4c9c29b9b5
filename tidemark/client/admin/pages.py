"""Calls of the APIs that work page by page."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol, TypeVar


class _Request(Protocol):
    page_token: str


class _Page(Protocol):
    @property
    def next_page_token(self) -> str: ...


Q = TypeVar("Q", bound=_Request)
P = TypeVar("P", bound=_Page)


async def pages(fetch: Callable[[Q], Awaitable[P]], request: Q) -> AsyncIterator[P]:
    """All pages of a listing, or all parts of a bounded change.

    Writes the token of each next page into the request.
    """
    while True:
        page = await fetch(request)
        yield page
        if not page.next_page_token:
            return
        request.page_token = page.next_page_token
