"""The command line: one module per sub-command of `quire`, each with `main(argv) -> exit code`.

Must not know: messages, sockets, torch.
"""
