"""Ports that are chosen beforehand stay free until their server takes them, also the next time."""

import socket

import pytest

from tidemark.local.ports import free_address, free_ports, listening_socket

HOST = "127.0.0.1"


def test_chosen_ports_are_different_and_free() -> None:
    ports = free_ports(HOST, 5)

    assert len(set(ports)) == 5
    for port in ports:
        listening_socket(HOST, port).close()


def test_the_kernel_gives_a_chosen_port_to_no_program_that_asks_for_any() -> None:
    """Or the program that gets it is taken for the server while that restarts."""
    with socket.socket() as any_port:
        any_port.bind((HOST, 0))
        (port,) = free_ports(HOST, 1)

        assert port < any_port.getsockname()[1]


def test_a_port_that_was_chosen_a_moment_ago_is_not_chosen_by_another_process() -> None:
    (port,) = free_ports(HOST, 1)

    with socket.socket() as chooser, pytest.raises(OSError, match="in use"):
        chooser.bind((HOST, port))
    listening_socket(HOST, port).close()


def test_what_is_not_an_address_of_this_machine_is_refused() -> None:
    with pytest.raises(OSError, match="assign requested address"):
        free_address("192.0.2.1")
