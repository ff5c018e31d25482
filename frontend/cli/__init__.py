"""The command line: one module per sub-command of `quire`, each with `main(argv) -> exit code`.
May know: the frontend's public classes, the configuration's fields.
Must not know: messages, sockets, torch."""
