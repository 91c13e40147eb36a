"""`python -m llmctl`: the `llmctl` program, where no folder of scripts is on PATH."""

from llmctl.cli.entry import main

if __name__ == "__main__":
    main()
