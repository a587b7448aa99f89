"""Decode with llama-server, a program on PATH, from the GGUF file in settings.target.

settings.mode is "plain", or "eagle3 N" for chains of N tokens from the EAGLE-3 head in
settings.draft, a GGUF file.
"""

import http.client
import json
import shutil
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from protocol import die_with_parent, serve

HOST = "127.0.0.1"
POLL_S = 0.2
STARTS_WITHIN_S = 120
HTTP_OK = 200


class LlamaServer:
    def __init__(self, settings):
        self.settings = settings
        self.program = shutil.which("llama-server")
        if self.program is None:
            raise RuntimeError(
                "llama-server: not on PATH. Build llama.cpp's target llama-server, and add its folder."
            )
        self.batch = None
        self.process = None
        self.port = None
        self.extras = {}

    def prepare(self, batch):
        """Start the server of ``batch`` slots in place of the last one."""
        if batch == self.batch:
            return
        if self.process:
            self.process.kill()
            self.process.wait()
        self.port = _free_port()
        command = [self.program, *self._arguments(batch)]
        self.process = subprocess.Popen(command, stdout=sys.stderr, preexec_fn=die_with_parent)
        deadline = time.monotonic() + STARTS_WITHIN_S
        while not self._is_ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(
                    f"llama-server: not ready (status {self.process.poll()}). See the log above."
                )
            time.sleep(POLL_S)
        self.batch = batch

    def _arguments(self, batch):
        settings = self.settings
        threads = str(settings.threads)
        arguments = [
            "-m",
            settings.target,
            "--host",
            HOST,
            "--port",
            str(self.port),
            "-t",
            threads,
            "-tb",
            threads,
        ]
        arguments += [
            "-np",
            str(batch),
            "-c",
            str(settings.max_model_len * batch),
            "--cache-ram",
            "0",
            "--no-webui",
        ]
        if settings.mode != "plain":
            length = settings.mode.removeprefix("eagle3 ")
            arguments += [
                "-md",
                settings.draft,
                "--spec-type",
                "draft-eagle3",
                "--spec-draft-n-max",
                length,
            ]
        return arguments

    def _is_ready(self):
        try:
            return self._request("GET", "/health", None)[0] == HTTP_OK
        except OSError:
            return False

    def generate(self, batch, prompts, max_tokens):
        body = {"n_predict": max_tokens, "cache_prompt": False, "return_tokens": True}
        body |= {
            "temperature": 0,
            "samplers": ["top_k"],
            "top_k": 1,
        }  # the shortest way to the likeliest token
        with ThreadPoolExecutor(batch) as threads:
            answers = list(
                threads.map(lambda prompt: self._complete({**body, "prompt": prompt}), prompts)
            )
        timings = [answer["timings"] for answer in answers]
        passes = sum(each["predicted_n"] - each.get("draft_n_accepted", 0) for each in timings)
        self.extras = {"tau": sum(each["predicted_n"] for each in timings) / passes}
        return [answer["tokens"] for answer in answers]

    def _complete(self, body):
        status, answer = self._request("POST", "/completion", json.dumps(body))
        if status != HTTP_OK:
            raise RuntimeError(f"llama-server: {answer}")
        return answer

    def _request(self, method, path, body):
        connection = http.client.HTTPConnection(HOST, self.port)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()


def _free_port():
    with socket.socket() as bound:
        bound.bind((HOST, 0))
        return bound.getsockname()[1]


if __name__ == "__main__":
    serve(LlamaServer, [])
