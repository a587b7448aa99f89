"""Decode with llama.cpp through llama-cpp-python's C interface, from the GGUF file in settings.target.

settings.mode is "plain", or "lookup N": llama-cpp-python's LlamaPromptLookupDecoding drafts up to N
tokens.
"""

import sys

import llama_cpp
import numpy
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from protocol import serve

MOST_BATCHED_TOKENS = 2048
FP32 = 0  # ggml's GGML_TYPE_F32
INFO = 2  # ggml's log levels
WARNING = 3
STATUS_OK = 0
LOOKUP = "lookup "


class LlamaCpp:
    def __init__(self, settings):
        self.settings = settings
        llama_cpp.llama_backend_init()
        llama_cpp.llama_log_set(_log, None)
        sys.stderr.write(llama_cpp.llama_print_system_info().decode() + "\n")
        params = llama_cpp.llama_model_default_params()
        params.use_mmap = False
        self.model = llama_cpp.llama_model_load_from_file(settings.target.encode(), params)
        if not self.model:
            raise RuntimeError(f"{settings.target}: llama.cpp cannot load it. See the log above.")
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(
            llama_cpp.llama_model_get_vocab(self.model)
        )
        self.lookup = None
        if settings.mode.startswith(LOOKUP):
            self.lookup = LlamaPromptLookupDecoding(
                num_pred_tokens=int(settings.mode.removeprefix(LOOKUP))
            )
        self.batch = None
        self.context = None
        self.tokens = llama_cpp.llama_batch_init(MOST_BATCHED_TOKENS, 0, 1)
        self.extras = {}

    def prepare(self, batch):
        """Make a context of ``batch`` sequences in place of the last one."""
        if batch == self.batch:
            return
        if self.context:
            llama_cpp.llama_free(self.context)
        self.context = llama_cpp.llama_init_from_model(self.model, self._params(batch))
        if not self.context:
            raise RuntimeError(f"llama.cpp: no context for {batch} sequences. See the log above.")
        self.batch = batch

    def _params(self, batch):
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = self.settings.max_model_len * batch
        params.n_batch = MOST_BATCHED_TOKENS
        params.n_seq_max = batch
        params.n_threads = self.settings.threads
        params.n_threads_batch = self.settings.threads
        params.no_perf = True
        if self.settings.dtype == "fp32":
            params.type_k = FP32
            params.type_v = FP32
        return params

    def generate(self, batch, prompts, max_tokens):
        requests = [
            Request(prompt, max_tokens, self.settings.eos_ids, self.lookup) for prompt in prompts
        ]
        waiting = requests[::-1]
        slots = [None] * batch

        while waiting or any(slots):
            rows = [
                row
                for slot, request in enumerate(slots)
                if request
                for row in request.next_rows(slot)
            ]
            for slot in range(batch):
                if (
                    slots[slot]
                    or not waiting
                    or len(rows) + len(waiting[-1].prompt) > MOST_BATCHED_TOKENS
                ):
                    continue
                self._remove(slot, 0)
                slots[slot] = waiting.pop()
                rows += slots[slot].prompt_rows(slot)
            for slot, tokens in self._decode(rows).items():
                slots[slot].append(tokens)
                if slots[slot].is_finished:
                    slots[slot] = None
                elif slots[slot].drafted:
                    self._remove(slot, slots[slot].length - 1)
        passes = sum(request.passes for request in requests)
        self.extras = {"tau": sum(len(request.output) for request in requests) / passes}
        return [request.output for request in requests]

    def _remove(self, slot, start):
        """Forget a slot's cells from a position on."""
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self.context), slot, start, -1)

    def _decode(self, rows):
        """Run (slot, token, position, has_logits) rows in one pass; return the likeliest tokens of each slot's rows."""
        for place, (slot, token, position, has_logits) in enumerate(rows):
            self.tokens.token[place] = token
            self.tokens.pos[place] = position
            self.tokens.n_seq_id[place] = 1
            self.tokens.seq_id[place][0] = slot
            self.tokens.logits[place] = has_logits
        self.tokens.n_tokens = len(rows)

        status = llama_cpp.llama_decode(self.context, self.tokens)
        if status != STATUS_OK:
            raise RuntimeError(f"llama_decode: status {status} for {len(rows)} rows.")
        likeliest = {}
        for place, (slot, _, _, has_logits) in enumerate(rows):
            if has_logits:
                likeliest.setdefault(slot, []).append(self._likeliest(place))
        return likeliest

    def _likeliest(self, place):
        logits = llama_cpp.llama_get_logits_ith(self.context, place)
        return int(numpy.ctypeslib.as_array(logits, (self.vocab_size,)).argmax())


class Request:
    """One prompt and its output so far."""

    def __init__(self, prompt, max_tokens, eos_ids, lookup):
        self.prompt = prompt
        self.max_tokens = max_tokens
        self.eos_ids = eos_ids
        self.lookup = lookup
        self.output = []
        self.drafted = []
        self.passes = 0
        self.is_finished = False

    @property
    def length(self):
        return len(self.prompt) + len(self.output)

    def prompt_rows(self, slot):
        last = len(self.prompt) - 1
        return [
            (slot, token, position, position == last) for position, token in enumerate(self.prompt)
        ]

    def next_rows(self, slot):
        """Return the rows of the last token and of what the lookup drafts after it."""
        if self.lookup is not None:
            room = self.max_tokens - len(self.output) - 1
            found = self.lookup(numpy.array(self.prompt + self.output, dtype=numpy.intc))
            self.drafted = found[:room].tolist()
        tokens = [self.output[-1], *self.drafted]
        return [
            (slot, token, self.length - 1 + offset, True) for offset, token in enumerate(tokens)
        ]

    def append(self, likeliest):
        """Append the likeliest token after each row, as far as the rows' own tokens were the likeliest."""
        self.passes += 1
        for offset, token in enumerate(likeliest):
            self.output.append(token)
            self.is_finished = token in self.eos_ids or len(self.output) == self.max_tokens
            if self.is_finished or offset == len(self.drafted) or token != self.drafted[offset]:
                return


@llama_cpp.llama_log_callback
def _log(level, text, _):
    if level >= INFO:
        sys.stderr.write(text.decode(errors="replace"))


if __name__ == "__main__":
    serve(LlamaCpp, ["llama_cpp_python"])
