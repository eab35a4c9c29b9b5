"""The client side of Tidemark: what programs that publish and consume import.

So far a session, which speaks the contract as it is; it never repeats a call and never reconnects.
"""

from tidemark.client.session import Consumer, Session, connect

__all__ = ["Consumer", "Session", "connect"]
