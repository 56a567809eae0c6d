"""All figures of a model from one pass and its own answers, kept in a file and written as OpenUnlearning does."""

from __future__ import annotations

import json
import math

import pytest
import torch

from language import byte_tokenizer, questions, tiny_llama
from unmerge.errors import FileError
from unmerge.evaluation.language import (
    Answers,
    ask,
    encode,
    generate,
    metrics,
    read_evaluation,
    score,
    write_evaluation,
)
from unmerge.evaluation.language.generation import rouge_recalls
from unmerge.evaluation.language.tofu import UTILITY

tokenizer = byte_tokenizer()
splits = {
    "forget": questions(4),
    "retain": questions(3, about="writer"),
    "real_authors": questions(3, paraphrased=False, about="poet"),
    "world_facts": questions(2, wrong=3, paraphrased=False, about="town"),
    "holdout": questions(5, wrong=0, paraphrased=False, about="stranger"),
}
ASKED = ("forget", "retain", "real_authors", "world_facts")


@pytest.fixture(scope="module")
def answers():
    return [ask(tiny_llama(seed), tokenizer, splits, ASKED, new_tokens=6) for seed in range(3)]


def probability(model, question, text):
    """exp(−mean token loss), by the model's own loss."""
    (sequence,) = encode(tokenizer, [(question, text)])
    labels = torch.tensor([[-100] * len(sequence.prompt) + sequence.response])
    with torch.no_grad():
        return math.exp(-model(torch.tensor([sequence.prompt + sequence.response]), labels=labels).loss.item())


def test_the_figures_follow_from_the_probabilities_of_single_answers(answers):
    model = tiny_llama(0)
    found = metrics(answers[0], splits)
    forget = splits["forget"]
    own = [probability(model, entry.question, entry.answer) for entry in forget]
    assert found["forget_Q_A_Prob"].value == pytest.approx(sum(own) / 4, rel=1e-4)
    assert [entry["prob"] for entry in found["forget_Q_A_Prob"].entries] == pytest.approx(own, rel=1e-4)

    ratios = []
    for entry in forget:
        wrong = [-math.log(probability(model, entry.question, text)) for text in entry.wrong]
        right = probability(model, entry.question, entry.paraphrase)
        ratios.append(math.exp(-sum(wrong) / len(wrong)) / right)
    assert [entry["score"] for entry in found["forget_Truth_Ratio"].entries] == pytest.approx(ratios, rel=1e-4)
    assert found["forget_Truth_Ratio"].value == pytest.approx(sum(min(r, 1 / r) for r in ratios) / 4, rel=1e-4)

    normalised, plain = [], []
    for entry in splits["world_facts"]:
        right = probability(model, entry.question, entry.answer)
        wrong = [probability(model, entry.question, text) for text in entry.wrong]
        normalised.append(right / (right + sum(wrong)))
        mean = math.exp(sum(map(math.log, wrong)) / len(wrong))
        plain.append(max(0, 1 - mean / right))  # without a paraphrase the answer itself is the right one
    assert found["wf_Q_A_Prob_normalised"].value == pytest.approx(sum(normalised) / 2, rel=1e-4)
    assert found["wf_Truth_Ratio"].value == pytest.approx(sum(plain) / 2, rel=1e-4, abs=1e-6)


def test_utility_is_of_nine_figures_and_the_references_bring_theirs(answers):
    own, retrained, base = answers
    alone, whole = metrics(own, splits), metrics(own, splits, retrained, base)
    assert len(UTILITY) == 9
    values = [whole[name].value for name in UTILITY]
    expected = 9 / sum(1 / value for value in values) if min(values) else 0
    assert whole["model_utility"].value == pytest.approx(expected)
    assert whole.keys() - alone.keys() == {"forget_quality", "privleak", "mia_reference"}
    assert metrics(own, splits, own)["forget_quality"].value == 1
    assert metrics(own, splits, own)["privleak"].value == 0


def test_answers_are_read_back_as_they_were(answers, tmp_path):
    answers[0].save(tmp_path / "answers.safetensors")
    again = Answers.load(tmp_path / "answers.safetensors")
    assert again.generated == answers[0].generated
    assert torch.equal(again.scores["forget"]["wrong"].log_probs, answers[0].scores["forget"]["wrong"].log_probs)
    assert metrics(again, splits, answers[1]) == metrics(answers[0], splits, answers[1])


def test_the_files_have_openunlearnings_form(answers, tmp_path):
    found = metrics(answers[0], splits, answers[1], answers[2])
    write_evaluation(tmp_path, found)
    summary = json.loads((tmp_path / "TOFU_SUMMARY.json").read_text())
    assert summary == {name: metric.value for name, metric in found.items()}
    whole = json.loads((tmp_path / "TOFU_EVAL.json").read_text())
    assert whole["forget_Truth_Ratio"]["agg_value"] == found["forget_Truth_Ratio"].value
    assert list(whole["forget_Truth_Ratio"]["value_by_index"]) == ["0", "1", "2", "3"]
    assert read_evaluation(tmp_path) == found
    (tmp_path / "TOFU_EVAL.json").write_text("[]")
    with pytest.raises(FileError, match="agg_value"):
        read_evaluation(tmp_path)


def test_a_batch_generates_what_each_question_alone_does():
    model = tiny_llama(1)
    asked = [entry.question + " " + "more " * place for place, entry in enumerate(questions(5))]
    together = generate(model, tokenizer, asked, new_tokens=8)
    alone = [generate(model, tokenizer, [text], new_tokens=8, batch_size=1)[0] for text in asked]
    assert together == alone


def test_greedy_answers_are_the_likeliest_tokens():
    model = tiny_llama(2)
    (text,) = generate(model, tokenizer, ["Who?"], new_tokens=5)
    tokens = tokenizer(tokenizer.apply_chat_template(
        [{"role": "user", "content": "Who?"}], tokenize=False, add_generation_prompt=True
    ), add_special_tokens=False)["input_ids"]  # fmt: skip
    start = len(tokens)
    for _ in range(5):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        if tokens[-1] == tokenizer.eos_token_id:
            break
    assert text == tokenizer.decode(tokens[start:], skip_special_tokens=True).strip()


def test_rouge_is_the_recall_of_the_longest_common_subsequence_of_stems():
    # author wrote novel(s): 3 of the 5 words, in their order.
    assert rouge_recalls(["The author has written novels"], ["an author who once had written a novel"]) == [3 / 5]
    assert rouge_recalls(["Paris"], [""]) == [0]


def test_scoring_in_half_precision_is_near():
    model, few = tiny_llama(0), encode(tokenizer, [(entry.question, entry.answer) for entry in questions(3)])
    exact, half = (score(model, few, autocast=autocast) for autocast in (False, True))
    torch.testing.assert_close(half.losses, exact.losses, rtol=0.02, atol=0.02)
    assert not torch.equal(half.losses, exact.losses)
