#!/usr/bin/env python3
"""Encode the demo corpus ahead, so that a machine with a GPU need not.

    python -m scripts.demo.encode --output corpus.npy [--corpus FOLDER_OR_ARCHIVE]

Writes the training text as one row of uint16 token ids, each document ended by `</s>`; scripts that
train heads take it as --corpus.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from scripts.demo.batches import TokenStream, encode_stream
from scripts.demo.corpus import read_corpus

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def read_stream(tokenizer: Tokenizer, corpus: Path | None) -> TokenStream:
    """The training text of a corpus, or what `main` has written of it. Raises SystemExit for a
    file that holds anything else."""
    if corpus is None or corpus.suffix != ".npy":
        documents = read_corpus(corpus).train
        return encode_stream(tokenizer, (document.text for document in documents))
    stored = np.load(corpus, allow_pickle=False)
    if stored.dtype != np.uint16 or stored.ndim != 1 or not stored.size:
        raise SystemExit(f"{corpus} is {stored.dtype} {stored.shape}; wanted a row of uint16 ids")
    if int(stored.max()) >= tokenizer.get_vocab_size():
        raise SystemExit(
            f"{corpus} has id {stored.max()}; the tokenizer has {tokenizer.get_vocab_size()} tokens"
        )
    stream: TokenStream = stored.astype(np.int32)
    return stream


def main() -> None:
    """Encode, store, say how much."""
    parser = argparse.ArgumentParser(description="Encode the demo corpus ahead.")
    parser.add_argument("--output", type=Path, required=True, help="an .npy file")
    parser.add_argument("--corpus", type=Path, help="as of scripts.demo.train")
    parser.add_argument("--target", type=Path, default=EXAMPLES / "demo-target")
    arguments = parser.parse_args()
    if arguments.output.suffix != ".npy":
        raise SystemExit(f"--output {arguments.output}: the file's name must end in .npy")
    tokenizer = Tokenizer.from_file(str(arguments.target / "tokenizer.json"))
    stream = read_stream(tokenizer, arguments.corpus)
    np.save(arguments.output, stream.astype(np.uint16))
    print(f"{arguments.output}: {len(stream)} tokens")


if __name__ == "__main__":
    main()
