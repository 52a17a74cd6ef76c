"""llama.cpp, through the wheel xllamacpp, in a process of its own: a bad file may abort it.

    answers = ask({"model.gguf": {"texts": [...], "prompts": [[1, 2]], "generate": 8}})

Of each file: `tokens` of the texts, `logprobs` of all tokens behind each prompt of ids, and `text`
that follows each of these greedily, as `text`, with its ids.
"""

import json
import pathlib
import subprocess
import sys
import urllib.request
from typing import Any

TIMEOUT = 120  # seconds


def ask(questions: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    found = subprocess.run(
        [sys.executable, __file__], input=json.dumps(questions), capture_output=True, text=True,
        timeout=TIMEOUT, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-3000:]
    return json.loads(found.stdout.splitlines()[-1])


def _answer(file: str, asked: dict[str, Any]) -> dict[str, Any]:
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(pathlib.Path(file))
    params.n_ctx, params.n_parallel, params.n_gpu_layers, params.port = 256, 1, 0, 0
    params.warmup, params.verbosity = False, 0
    params.cpuparams.n_threads = 1
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    server = xllamacpp.Server(params)

    def post(path: str, **body: Any) -> dict[str, Any]:
        request = urllib.request.Request(
            f"{server.listening_address}/{path}", json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )  # fmt: skip
        with urllib.request.urlopen(request) as response:
            return json.load(response)

    found: dict[str, Any] = {"tokens": [], "logprobs": [], "ids": [], "text": []}
    for text in asked.get("texts", ()):
        answer = post("tokenize", content=text, add_special=True, parse_special=True)
        found["tokens"].append(answer["tokens"])
    for prompt in asked.get("prompts", ()):
        options = {"prompt": prompt, "temperature": 0, "cache_prompt": False}
        # The one token has a text, as only such are listed; the bias is not in the listed numbers.
        answer = post("completion", n_predict=1, n_probs=10**4, logit_bias=[["a", 1e3]], **options)
        [listed] = answer["completion_probabilities"]
        listed = sorted(listed["top_logprobs"], key=lambda one: one["id"])
        found["logprobs"].append([one["logprob"] for one in listed])
        if number := asked.get("generate"):
            answer = post("completion", n_predict=number, return_tokens=True, **options)
            found["ids"].append(answer["tokens"])
            found["text"].append(answer["content"])
    return found


if __name__ == "__main__":
    wanted = json.load(sys.stdin)
    print("\n" + json.dumps({file: _answer(file, asked) for file, asked in wanted.items()}))
    sys.stdout.flush()
