"""clipctl browse"""

import errno

from clipctl.cli import options, output
from clipctl.cli.commands.search import opened
from clipctl.errors import ConfigError


def browse(
    index: options.Index,
    model: options.ModelOf = None,
    port: options.Port = 0,
    no_open: options.NoOpen = False,
    device: options.DeviceOf = "cpu",
    runs_dir: options.RunsDir = None,
) -> None:
    """Search pictures in the browser, on this machine only."""
    from clipctl.hardware.processes import interrupts_raised

    with output.stops_said(), output.counting("embedding", "loading the model") as (tell, progress):
        from clipctl.report.browse import Searcher, Server

        searcher = Searcher(*opened(index, model, device, runs_dir, tell, progress))
        try:
            server = Server(searcher, port)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            raise ConfigError(f"port {port} cannot be used: {error.strerror}", "leave --port out") from None
    output.data().print(output.plain(server.address), soft_wrap=True)
    output.prose().print("Press Ctrl-C to stop.")
    if not no_open:  # in a thread: a browser in this terminal would wait for the page, and the page for it
        import threading
        import webbrowser

        threading.Thread(target=webbrowser.open, args=(server.address,), daemon=True).start()
    try:
        with interrupts_raised():
            server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
