"""Hand this process's arguments, environment and standard streams to the server of `forked_workers.py`.

    python -I -S forked_worker_client.py SOCKET SCRIPT ARGUMENTS

Imports little: it runs once for each of Ray's workers.
"""

import json
import os
import socket
import struct
import sys

HEADER = struct.Struct("!Q")
NUM_STREAMS = 3


def main() -> None:
    path, *argv = sys.argv[1:]
    text = json.dumps({"argv": argv, "cwd": os.getcwd(), "env": dict(os.environ)}).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        socket.send_fds(connection, [HEADER.pack(len(text))], range(NUM_STREAMS))
        connection.sendall(text)


if __name__ == "__main__":
    main()
