"""Tidemark: a message-queue cluster for very many, mostly idle queues.

This package holds what users import and what the services share. It never imports a service.
"""

__version__ = "0.1.0"
