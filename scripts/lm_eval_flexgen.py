#!/usr/bin/env python3
"""lm_eval_flexgen.py: flexgen as a model of lm-evaluation-harness (pip install lm_eval).

    python3 scripts/lm_eval_flexgen.py --model flexgen --model_args "model=DIR,flags=--percent 0 100 0 100 0 100" --tasks lambada_openai

The command line is lm_eval's. `flags` are flexgen's, for any policy and device; the search chooses without them. All requests of a call are
one run of the program. Scores are those of lm_eval's own model `hf` (scripts/lm_eval_check.py compares them): a long context loses its
beginning, and a long text is cut into windows. A prompt to generate from that is too long for the model is an error.
"""
import json
import shlex
import subprocess

from lm_eval.__main__ import cli_evaluate
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model


@register_model("flexgen")
class FlexGen(LM):
    def __init__(self, model, flags="", program="./flexgen", bos="</s>", **_):
        super().__init__()
        self.program, self.flags, self.bos = program, ["--model", model, *shlex.split(flags)], bos

    def run(self, command, lines):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        done = subprocess.run([self.program, *command, *self.flags], input=text, stdout=subprocess.PIPE, encoding="utf-8")
        results = [json.loads(line) for line in done.stdout.split("\n") if line]
        for result in results:
            if "error" in result:
                raise RuntimeError(f"flexgen: {result['error']}")
        if len(results) != len(lines):
            raise RuntimeError(f"flexgen: {len(results)} results of {len(lines)}, exit status {done.returncode}")
        return results

    def bare(self, text):
        """Returns a text without the token in front, which the program puts there itself."""
        return text.removeprefix(self.bos)

    def score(self, pairs):
        return self.run(["eval", "--score", "-"], [{"prompt": p, "completion": c} for p, c in pairs])

    def loglikelihood(self, requests, disable_tqdm=False):
        pairs = [(self.bare(c), t) if c else ("", self.bare(t)) for c, t in (r.args for r in requests)]
        return [(s["logprob"], s["greedy"]) for s in self.score(pairs)]

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        """The harness has the token in front twice, and scores the second as well."""
        return [s["logprob"] for s in self.score([("", self.bos + self.bare(r.args[0])) for r in requests])]

    def generate_until(self, requests, disable_tqdm=False):
        groups, texts = {}, {}
        for place, r in enumerate(requests):
            kwargs = r.args[1]
            until = kwargs.get("until") or []
            flags = [f for stop in ([until] if isinstance(until, str) else until) if stop for f in ("--stop", stop)]
            if kwargs.get("do_sample"):
                flags += ["--temperature", str(kwargs.get("temperature", 1))]
            groups.setdefault(tuple(flags), []).append(place)
        for flags, places in groups.items():
            asked = [requests[p].args for p in places]
            lines = [{"prompt": self.bare(context), "max_tokens": kwargs.get("max_gen_toks", 256)} for context, kwargs in asked]
            results = self.run(["generate", "--prompts", "-", "--format", "jsonl", *flags], lines)
            texts.update(zip(places, (r["completion"] for r in results)))
        return [texts[p] for p in range(len(requests))]


if __name__ == "__main__":
    cli_evaluate()
