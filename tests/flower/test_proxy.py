"""The reverse proxy of examples/flower alone, before a server that only counts: what never reaches a SuperLink."""

import contextlib
import http.client
import http.server
import importlib.util
import ssl
import subprocess
import threading
import time
from collections import Counter

import pytest
from processes import LONG, NGINX, ROOT, free_port, proxy_config

pytestmark = pytest.mark.skipif(NGINX is None, reason="nginx is not installed, which examples/flower/nginx.conf is for")
MIB = 1 << 20


class Counting(http.server.BaseHTTPRequestHandler):
    """Answers every request, and keeps the path and the length of its body."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.seen.append((self.path, len(body)))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def proxied(tmp_path_factory):
    """Start nginx with the shipped configuration; gives a way to connect to it, and the requests that passed it."""
    folder = tmp_path_factory.mktemp("proxy")
    spec = importlib.util.spec_from_file_location("keys", ROOT / "examples" / "flower" / "keys.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.make(folder / "keys", "127.0.0.1", [])
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Counting)
    server.seen = []
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / "keys" / "server.crt", folder / "keys" / "server.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    port, file = free_port(), folder / "nginx.conf"
    text = proxy_config(folder, folder / "keys", port, server.server_port)
    assert "limit_conn all 1000;" in text
    file.write_text(text.replace("limit_conn all 1000;", "limit_conn all 55;"))  # which a test can reach
    # One process, because root's workers are another user's and cannot enter the folder.
    command = [NGINX, "-c", file, "-p", folder, "-g", "daemon off; master_process off;"]
    checked = subprocess.run([*command, "-t"], capture_output=True, text=True, timeout=LONG)
    assert checked.returncode == 0, checked.stderr
    assert "warn" not in checked.stderr
    nginx = subprocess.Popen(command)
    trusting = ssl.create_default_context(cafile=folder / "keys" / "ca.crt")

    opened = []

    def connected(address="127.0.0.1"):
        source = (address, 0)
        opened.append(
            http.client.HTTPSConnection("127.0.0.1", port, timeout=LONG, source_address=source, context=trusting)
        )
        return opened[-1]

    try:
        until = time.monotonic() + LONG
        while True:
            try:
                connected().connect()
                break
            except OSError:
                assert time.monotonic() < until
                time.sleep(0.05)
        yield connected, server.seen
    finally:
        for connection in opened:
            connection.close()
        nginx.terminate()
        nginx.wait(LONG)
        server.shutdown()
        server.server_close()


def asked(connection, path="/v1/fleet/push-object", length=0, sent=None):
    """Send a request with a body, of which only a part may be sent; return the status of the answer."""
    connection.putrequest("POST", path)
    connection.putheader("Content-Length", str(length))
    connection.endheaders()
    connection.send(bytes(length if sent is None else sent))
    with connection.getresponse() as answer:
        answer.read()
    if answer.status == 413:
        connection.close()  # nginx waits for the rest of the body
    return answer.status


def test_a_large_body_is_refused_before_it_is_read(proxied):
    connected, seen = proxied
    del seen[:]
    assert asked(connected(), length=600 * MIB, sent=0) == 413
    assert asked(connected(), length=9 * MIB, sent=0) == 413
    assert asked(connected(), path="/v1/runtime/push-object", length=10) == 403
    assert seen == []
    assert asked(connected(), length=6 * MIB) == 200  # a piece of a model has 5 MiB
    assert seen == [("/v1/fleet/push-object", 6 * MIB)]


def test_a_slow_request_reaches_nobody_until_it_is_whole(proxied):
    connected, seen = proxied
    del seen[:]
    slow = connected()
    slow.putrequest("POST", "/v1/fleet/pull-messages")
    slow.putheader("Content-Length", "20")
    slow.endheaders()
    slow.send(bytes(10))
    assert asked(connected(), path="/v1/fleet/other") == 200
    assert seen == [("/v1/fleet/other", 0)]
    slow.send(bytes(10))
    with slow.getresponse() as answer:
        assert answer.status == 200
    assert seen[1:] == [("/v1/fleet/pull-messages", 20)]


@pytest.mark.parametrize(
    ("held", "refused"),
    [({1: 60}, 10), ({2: 40, 3: 40}, 25)],
    ids=["of one address, 50 are let through", "of all addresses, 55"],
)
def test_too_many_requests_at_once_are_refused(proxied, held, refused):
    connected, seen = proxied
    del seen[:]
    connections = [connected(f"127.0.0.{last}") for last, number in held.items() for _ in range(number)]
    for connection in connections:
        connection.putrequest("POST", "/v1/fleet/pull-messages")
        connection.putheader("Content-Length", "1")
        connection.endheaders()  # and no body
        connection.sock.setblocking(False)
    until, answers = time.monotonic() + LONG, {}
    while len(answers) < refused and time.monotonic() < until:
        for connection in set(connections) - answers.keys():
            with contextlib.suppress(ssl.SSLWantReadError):
                answers[connection] = connection.sock.recv(12)
        time.sleep(0.01)
    for connection in connections:  # those that were let through still count
        connection.close()
    assert set(answers.values()) == {b"HTTP/1.1 503"}
    assert refused <= len(answers) < refused + 10  # nginx may still be closing connections of other tests
    assert seen == []


def test_a_flood_is_refused(proxied):
    connected, seen = proxied
    del seen[:]
    statuses, began, connection = Counter(), time.monotonic(), connected()
    while statuses[503] < 100 and time.monotonic() < began + LONG:
        statuses[asked(connection)] += 1
    assert statuses.keys() == {200, 503}
    assert statuses[200] == len(seen) <= 500 + 50 * (time.monotonic() - began) + 2  # the burst, and 50 a second
