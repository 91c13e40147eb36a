"""Put pip into a virtual environment where neither ensurepip nor pip is on the machine.

    python -m scripts.setup.bootstrap_pip VENV/bin/python

Debian and Ubuntu ship `venv` without ensurepip unless python3-venv is installed. A wheel of pip
can run itself: this fetches the newest one from PyPI, checks its SHA-256 against the index, and
lets it install itself. Standard library only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import urljoin
from urllib.request import urlopen

INDEX = "https://pypi.org/pypi/pip/json"
TIMEOUT_S = 30


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("python", help="interpreter to install pip for")
    target_python = parser.parse_args().python
    with urlopen(INDEX, timeout=TIMEOUT_S) as reply:
        files = json.load(reply)["urls"]
    wheel = next(file for file in files if file["filename"].endswith("py3-none-any.whl"))
    url = urljoin(INDEX, wheel["url"])  # mirrors give relative addresses
    with urlopen(url, timeout=TIMEOUT_S) as reply:
        content = reply.read()
    wanted = wheel["digests"]["sha256"]
    found = hashlib.sha256(content).hexdigest()
    if found != wanted:
        sys.exit(f"{url} has SHA-256 {found}, the index says {wanted}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / wheel["filename"]
        path.write_bytes(content)
        # Python runs a zip file's __main__; naming the folder inside runs pip's.
        command = [target_python, f"{path}/pip", "install", "--quiet", str(path)]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
