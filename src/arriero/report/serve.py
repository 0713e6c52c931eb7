"""Serve a page that is made again for each request."""

from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from arriero.errors import UserError
from arriero.ui import make_console


def serve_page(make: Callable[[bool], str], port: int) -> None:
    """Serve on this host only, until interrupted; a remote browser needs an ssh tunnel.

    The argument of `make` is whether the page is opened, and not refreshed by its own script.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = make("content" not in self.path).encode()
            # a browser may leave before it has read the page
            with suppress(ConnectionError):
                self.send_response(200)
                self.send_header("Content-Type", "text/html; charset=utf-8")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing per request."""

    try:
        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except OSError as error:
        raise UserError(f"port {port} cannot be used ({error})", "choose another with --port") from None
    with server:
        make_console().plain(f"serving http://127.0.0.1:{server.server_port} until Ctrl-C")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return
