"""Retention and eviction on PySpark: reads tables from storage, plans, and applies over gRPC."""

from tidemark.settings import keep_grpc_out_of_forks

keep_grpc_out_of_forks()  # Spark starts Java by a fork
