"""`python -m broker_svc`: reads the settings, wires the service, serves until a signal."""

from broker_svc.app import broker
from tidemark.service.process import main
from tidemark.settings import BrokerSettings

if __name__ == "__main__":
    main("tidemark-broker", BrokerSettings, broker)
