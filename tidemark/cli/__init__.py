"""The command line: `tidemark ...`.

One module per command. What a command needs is imported when it runs, so that `--help` stays quick.
"""
