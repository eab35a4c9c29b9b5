"""`python -m broker_svc`: reads the settings, wires the service, serves until a signal."""

from tidemark.settings import BrokerSettings, turn_off_grpc_event_engine

turn_off_grpc_event_engine()  # before anything imports gRPC

from broker_svc.app import broker  # noqa: E402
from tidemark.service.process import main  # noqa: E402

if __name__ == "__main__":
    main("tidemark-broker", BrokerSettings, broker)
