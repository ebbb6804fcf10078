"""One module per command of the command line, each with `add_arguments` and `run`.

A command parses its arguments, calls another package and prints the result. It may import everything; the runtime,
and whatever else needs torch or numpy, only inside functions. Nothing imports a command but `toolkit.cli`.
"""
