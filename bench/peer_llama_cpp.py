"""llama.cpp, run by its own Python: commands on stdin, answers on stdout, a JSON line each.

Nothing of Outrider is imported here. The only argument is a JSON object: model (a .gguf file),
threads, context_len.
"""

import importlib
import json
import os
import sys
import time
from typing import Any


def load(settings: dict[str, Any]) -> Any:
    """The file as it is, with its defaults but for threads and context."""
    llama_cpp = importlib.import_module("llama_cpp")
    return llama_cpp.Llama(
        model_path=settings["model"],
        n_ctx=settings["context_len"],
        n_threads=settings["threads"],
        n_threads_batch=settings["threads"],
        verbose=False,
    )


def complete(llm: Any, command: dict[str, Any]) -> dict[str, Any]:
    """Continue one prompt, greedily, to exactly that many tokens."""
    (prompt,) = command["prompts"]
    token_ids: list[int] = []
    began = time.perf_counter()
    llm.reset()
    for token in llm.generate(prompt, temp=0.0, repeat_penalty=1.0):
        token_ids.append(token)
        if len(token_ids) == command["new_tokens"]:
            break
    return {"seconds": time.perf_counter() - began, "token_ids": [token_ids]}


def main() -> None:
    """Load, say so, then answer commands until stdin ends."""
    # Answers alone go to the real stdout; whatever libraries print goes to stderr.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    llm = load(json.loads(sys.argv[1]))
    version = importlib.import_module("llama_cpp").__version__
    print(json.dumps({"version": version}), file=answers, flush=True)
    for line in sys.stdin:
        try:
            answer = complete(llm, json.loads(line))
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
