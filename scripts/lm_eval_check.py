#!/usr/bin/env python3
"""lm_eval_check.py: compare flexgen as a model of lm-evaluation-harness with the harness's own model `hf`.

    python3 scripts/lm_eval_check.py [--model models/opt-tiny] [--flags FLAGS] [--documents 40]

Both run four tasks that are made of stories.txt beside the model: multiple choice (the right end of a sentence and three others), the last
word (the form of LAMBADA), perplexity of documents (some longer than the model's positions) and generation up to a full stop. Every answer
is compared, and then the figures of the tasks. Exit status 1 if one differs by more than 1e-3, or by 1e-3 of what is larger than 1.
Needs `pip install lm_eval[hf] datasets` (made with lm_eval 0.4.13, transformers 5.24.0, torch 2.15.0 and datasets 5.2.0); says that it is
skipped where one is missing.
"""
import argparse
import json
import os
import random
import sys
import tempfile

TOLERANCE = 1e-3  # fp16 rounding of the cache, and sums in another order

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
try:
    import accelerate  # noqa: F401
    import datasets  # noqa: F401
    import torch  # noqa: F401
    import transformers  # noqa: F401
    import lm_eval.models  # noqa: F401
    from lm_eval import simple_evaluate

    from lm_eval_flexgen import FlexGen
except ImportError as missing:
    sys.exit(print(f"lm_eval_check.py: skipped: {missing}"))


def documents(path, count):
    """Returns, for each task, documents cut from the stories. Contexts of choices are of all kinds: with a blank at the end, empty, with
    the first token in front, longer than the model's positions."""
    rng = random.Random(1)
    stories = [s.strip() for s in open(path, encoding="utf-8").read().split("\n\n")]
    sentences = [s.split() for story in stories for s in story.replace("\n", " ").split(". ") if 8 < len(s.split()) < 30]
    rng.shuffle(sentences)
    halves = [(" ".join(s[:len(s) // 2]), " ".join(s[len(s) // 2:])) for s in sentences]
    kinds = [lambda s: s, lambda s: s + " ", lambda s: "", lambda s: "</s>" + s, lambda s: "\n\n".join(stories[:8]) + " " + s]
    choice = [{"context": kinds[i % 5](halves[i][0]), "ends": [halves[i + j][1] for j in range(4)], "right": 0} for i in range(count)]
    words = [{"text": " ".join(s)} for s in sentences[-count:]]
    texts = [{"text": "\n\n".join(stories[i:i + 1 + 5 * (i % 4 == 0)])} for i in range(count // 2)]
    return {"choice": choice, "words": words, "texts": texts, "stops": words[:count // 4]}


def tasks(folder, made):
    """Returns the configurations of the tasks, whose documents it writes as JSON lines."""
    def of(name, **more):
        path = os.path.join(folder, name + ".jsonl")
        with open(path, "w", encoding="utf-8") as f:
            f.writelines(json.dumps(d) + "\n" for d in made[name])
        return {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": path}}, "test_split": "test", **more}

    def metrics(*names):
        return [{"metric": m} for m in names]
    start, end = "{{text.split(' ')[:-1]|join(' ')}}", "{{' '+text.split(' ')[-1]}}"
    return [of("choice", output_type="multiple_choice", doc_to_text="{{context}}", doc_to_choice="{{ends}}", doc_to_target="{{right}}",
               metric_list=metrics("acc", "acc_norm")),
            of("words", output_type="loglikelihood", doc_to_text=start, doc_to_target=end, metric_list=metrics("perplexity", "acc")),
            of("texts", output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="{{text}}",
               metric_list=metrics("word_perplexity", "byte_perplexity", "bits_per_byte")),
            of("stops", output_type="generate_until", doc_to_text=start, doc_to_target=end, metric_list=metrics("exact_match"),
               generation_kwargs={"until": ["."], "max_gen_toks": 24, "do_sample": False})]


def answers(model, model_args, folder, made):
    """Returns each task's figures, and each document's answers."""
    got = simple_evaluate(model=model, model_args=model_args, tasks=tasks(folder, made), batch_size=8, device="cpu", bootstrap_iters=0)
    figures = {task: {k: v for k, v in r.items() if isinstance(v, float) and "stderr" not in k} for task, r in got["results"].items()}
    return figures, {task: [s["resps"] for s in sorted(samples, key=lambda s: s["doc_id"])] for task, samples in got["samples"].items()}


def numbers(answer):
    """Returns the numbers in an answer of any depth, in order; a text and a truth are as they are."""
    if isinstance(answer, (list, tuple)):
        return [n for a in answer for n in numbers(a)]
    return [answer]


def difference(a, b):
    """Of numbers it is relative where they are large: the score of a text is a sum over its tokens."""
    return abs(a - b) / max(1, abs(a)) if isinstance(a, float) and isinstance(b, float) else float(a != b)


def main():
    ap = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    ap.add_argument("--model", default="models/opt-tiny")
    ap.add_argument("--flags", default="--device host --percent 0 100 0 100 0 100 --gpu-batch-size 8 --num-gpu-batches 2")
    ap.add_argument("--documents", type=int, default=40)
    a = ap.parse_args()
    made = documents(os.path.join(a.model, "stories.txt"), a.documents)
    with tempfile.TemporaryDirectory() as folder:
        theirs, their_answers = answers("hf", {"pretrained": a.model, "dtype": "float32"}, folder, made)
        ours, our_answers = answers(FlexGen(a.model, a.flags), None, folder, made)
    worst = 0
    for task in sorted(theirs):
        pairs = list(zip(numbers(their_answers[task]), numbers(our_answers[task]), strict=True))
        most = max(difference(x, y) for x, y in pairs)
        print(f"{task}: {len(pairs)} answers, the largest difference {most:.2g}")
        for name, figure in sorted(theirs[task].items()):
            print(f"    {name:30} hf {figure:12.6f}   flexgen {ours[task][name]:12.6f}")
            worst = max(worst, difference(figure, ours[task][name]))
        worst = max(worst, most)
    print("equal" if worst <= TOLERANCE else "DIFFERENT", f"to {TOLERANCE:g}")
    return worst > TOLERANCE


if __name__ == "__main__":
    sys.exit(main())
