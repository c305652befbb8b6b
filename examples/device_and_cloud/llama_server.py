"""llama.cpp's server from the wheel `xllamacpp`: `python llama_server.py FILE PORT [THREADS]`.

Any other server will do as well: `llama-server -m MODEL.gguf --port PORT --jinja`, Ollama, LM
Studio.
"""

import signal
import sys

import xllamacpp


def main(model: str, port: int, num_threads: int = 1) -> None:
    """Serve until SIGTERM or Ctrl-C."""
    parameters = xllamacpp.CommonParams()
    parameters.model.path = model
    parameters.hostnames = ["127.0.0.1"]
    parameters.port = port
    parameters.n_ctx = 8192
    parameters.n_parallel = 2
    parameters.cpuparams.n_threads = num_threads  # for prompts too
    parameters.use_jinja = True  # the chat template of the file
    parameters.fit_params = False  # it need not measure the memory of GPUs
    signals = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # for the server's threads too
    server = xllamacpp.Server(parameters)
    sys.stdout.write(f"listening on {server.listening_address}\n")
    sys.stdout.flush()
    signal.sigwait(signals)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:4]))
