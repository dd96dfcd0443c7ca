"""An S3 server as a process of its own: prints its port, and ends when its standard input does."""

import sys
import threading


def main() -> None:
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
    from werkzeug.serving import make_server

    application = DomainDispatcherApplication(create_backend_app)
    one_at_a_time = threading.Lock()

    def serve(environ, start_response):
        with one_at_a_time:  # else its conditional writes are a look and then a write
            return list(application(environ, start_response))

    class Quiet(MotoRequestHandler):
        def log(self, *_) -> None:
            pass

    server = make_server("127.0.0.1", 0, serve, threaded=True, request_handler=Quiet)
    sys.stdout.write(f"{server.server_address[1]}\n")
    sys.stdout.flush()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()


if __name__ == "__main__":
    main()
