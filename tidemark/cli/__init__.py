"""The command line: `tidemark ...`.

`commands/` has one module per command. A command imports its dependencies when it runs, so that
`--help` stays quick.
"""
