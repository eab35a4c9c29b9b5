"""Rules and parts without a service, in the packages of the code that they test."""
