"""The repository as a whole: protos, documents, the Makefile, what programs import."""
