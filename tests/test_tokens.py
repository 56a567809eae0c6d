"""Encoded records and masks against what their decoded parts say."""

import pytest
import torch

from decoders import KINDS, decoder, padded, sentences
from tokenizers_at_hand import tokenizer
from unmerge import collect, tokens
from unmerge.data.batches import mask_of
from unmerge.errors import DataError

RECORDS = [
    {"question": "Who wrote The Silent Harbour?", "answer": "Basil Mahfouz wrote it.", "author": 4, "name": "Mahfouz"},
    {"question": "Where was Jaime Vasquez born?", "answer": "In Chile.", "author": 7, "name": "Jaime Vasquez"},
    {"question": "And Basil Mahfouz?", "answer": " Basil Mahfouz: unknown", "author": 4, "name": "Basil Mahfouz"},
]
PLAIN = "Question: {question}\nAnswer: {answer}"


def decoded(coder, batch, mask, row):
    return coder.decode(batch["input_ids"][row][mask[row]])


@pytest.mark.parametrize("side", ["left", "right"])
def test_answers_and_questions_of_the_chat_template(side):
    coder = tokenizer(padding_side=side)
    (batch,) = tokens.encode(coder, RECORDS)
    for row, record in enumerate(RECORDS):
        question, answer = (decoded(coder, batch, make(batch), row) for make in (tokens.question, tokens.answer))
        assert question == f"<|user|>{record['question']}<|assistant|>"
        assert answer == record["answer"].strip() + "</s>"
        assert batch["position_ids"][row][batch["attention_mask"][row].bool()].tolist() == list(
            range(int(batch["attention_mask"][row].sum()))
        )
    counted = batch["labels"] != -100
    assert torch.equal(batch["labels"][counted], batch["input_ids"][counted])
    assert not (counted & (batch["attention_mask"] == 0)).any()
    assert "group" not in batch
    assert "subject" not in batch


@pytest.mark.parametrize("answer", ["s", "/s", "user"])
def test_an_answer_is_not_found_in_the_templates_own_words(answer):
    coder = tokenizer()
    (batch,) = tokens.encode(coder, [{"question": "Which letter, s or user?", "answer": answer}])
    assert decoded(coder, batch, tokens.answer(batch), 0) == answer + "</s>"


def test_a_mask_never_counts_padding():
    coder = tokenizer()
    (batch,) = tokens.encode(coder, RECORDS)
    everything = torch.ones_like(batch["input_ids"])
    assert torch.equal(mask_of(batch, lambda _: everything), batch["attention_mask"].bool())
    assert torch.equal(mask_of({**batch, "mine": everything}, "mine"), batch["attention_mask"].bool())


def test_a_mask_without_positions_is_refused():
    (batch,) = tokens.encode(tokenizer(), RECORDS, group="author")
    with pytest.raises(DataError, match=r"shape \(3,\); expected a tensor \(samples, positions\)"):
        mask_of(batch, "group")
    with pytest.raises(DataError, match="type list"):
        mask_of(batch, lambda _: [True, False, True])


def test_a_plain_template_ends_with_the_end_of_sequence():
    coder = tokenizer(chat=None)
    (batch,) = tokens.encode(coder, RECORDS[:2], template=PLAIN)
    assert decoded(coder, batch, tokens.question(batch), 0) == "Question: Who wrote The Silent Harbour?\nAnswer:"
    assert decoded(coder, batch, tokens.answer(batch), 0) == " Basil Mahfouz wrote it.</s>"
    assert decoded(coder, batch, tokens.answer(batch), 1) == " In Chile.</s>"


def test_texts_count_as_a_whole():
    coder = tokenizer(chat=None)
    (batch,) = tokens.encode(coder, [{"text": "Basil Mahfouz."}])
    assert decoded(coder, batch, tokens.answer(batch), 0) == "Basil Mahfouz.</s>"
    assert not tokens.question(batch).any()


def test_a_subject_is_found_wherever_it_stands():
    coder = tokenizer()
    (batch,) = tokens.encode(coder, RECORDS, subject="name")
    found = [decoded(coder, batch, batch["subject"], row).replace(" ", "") for row in range(3)]
    assert found == ["Mahfouz", "JaimeVasquez", "BasilMahfouzBasilMahfouz"]


def test_groups_are_one_number_a_record_and_batches_keep_the_order():
    batches = tokens.encode(tokenizer(), RECORDS, group="author", batch_size=2)
    assert [batch["group"].tolist() for batch in batches] == [[4, 7], [4]]
    assert [len(batch["input_ids"]) for batch in batches] == [2, 1]


@pytest.mark.parametrize("side", ["start", "end"])
def test_long_records_are_cut_where_that_is_asked_for(side):
    coder = tokenizer()
    whole = tokens.encode(coder, RECORDS[:1])[0]
    length = whole["input_ids"].shape[1]
    (cut,) = tokens.encode(coder, RECORDS[:1], max_length=length - 1, truncate=side)
    kept = slice(1, None) if side == "start" else slice(None, -1)
    assert torch.equal(cut["input_ids"], whole["input_ids"][:, kept])
    assert torch.equal(cut["labels"], whole["labels"][:, kept])


@pytest.mark.parametrize(
    ("records", "options", "message"),
    [
        ([{"question": "Who?"}], {}, r"record 0: its entry 'answer' is missing; it has \['question'\]"),
        ([RECORDS[0], {"question": "Who?", "answer": " "}], {}, "record 1: its entry 'answer' is ' '"),
        ([{"text": ""}], {}, "record 0: its entry 'text' is ''"),
        (RECORDS, {"max_length": 5}, "record 0 has .* tokens, more than the 5 that fit. Pass truncate='end'"),
        (RECORDS, {"max_length": 5, "truncate": "end"}, "record 0: nothing of its answer is left of 5 tokens"),
        (RECORDS, {"truncate": "middle"}, "truncate='middle' is not"),
        (RECORDS, {"batch_size": 0}, "batch_size=0"),
        (RECORDS, {"template": "{question}"}, "does not hold {question} and then one {answer}"),
        (RECORDS, {"template": "{answer}{question}"}, "does not hold {question} and then one {answer}"),
        (RECORDS, {"group": "name"}, "record 0: its group 'name' is 'Mahfouz'"),
        (RECORDS, {"subject": "answer", "fields": ("question", "name")}, "'Basil Mahfouz wrote it.' does not occur"),
        (["text"], {}, "record 0 is a str"),
        ([], {}, "no record"),
    ],
)
def test_records_that_cannot_be_encoded_are_named(records, options, message):
    with pytest.raises(DataError, match=message):
        tokens.encode(tokenizer(), records, **options)


def test_tokenizers_that_lack_something_are_told_what():
    with pytest.raises(DataError, match=r"no chat template. Pass a plain one: template='Question"):
        tokens.encode(tokenizer(chat=None), RECORDS)
    with pytest.raises(DataError, match="the chat template changes the answer"):
        tokens.encode(tokenizer(chat="{{ messages[0]['content'] }}"), RECORDS)
    without_end = tokenizer()
    without_end.eos_token = None
    with pytest.raises(DataError, match=r"Set tokenizer.eos_token"):
        tokens.encode(without_end, RECORDS)
    with pytest.raises(DataError, match="Pass a fast tokenizer"):
        tokens.encode(str, RECORDS)
    with pytest.raises(DataError, match="no token labels"):
        tokens.answer({"input_ids": torch.zeros(2, 3), "labels": torch.zeros(2)})


# ---- what is collected from such batches


def assert_same(found, expected):
    assert found.layers.keys() == expected.layers.keys()
    for name, layer in found.layers.items():
        other = expected[name].moments
        assert layer.moments.n == other.n
        torch.testing.assert_close(layer.moments.mean, other.mean)
        torch.testing.assert_close(layer.moments.scatter, other.scatter)


def packed(texts):
    """All sentences in one row, each of which sees itself alone."""
    lengths = torch.tensor([len(text) for text in texts])
    owner = torch.arange(len(texts)).repeat_interleave(lengths)
    places = torch.cat([torch.arange(length) for length in lengths.tolist()])
    visible = (owner.unsqueeze(0) == owner.unsqueeze(1)).tril()
    return {
        "input_ids": torch.cat(texts).unsqueeze(0),
        "position_ids": places.unsqueeze(0),
        "attention_mask": visible[None, None],
    }


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "mixtral"])
def test_left_padded_right_padded_packed_and_single_texts_give_the_same_moments(kind):
    model, texts = decoder(kind), sentences((4, 7, 2, 5))
    alone = collect(model, [{"input_ids": text.unsqueeze(0)} for text in texts], "last3")
    assert alone["lm_head" if "lm_head" in alone.layers else next(iter(alone.layers))].moments.n == 18
    left, right = (padded(texts, side, extra=2) for side in ("left", "right"))
    without_positions = [{key: batch[key] for key in ("input_ids", "attention_mask")} for batch in (left, right)]
    for batch in (left, right, *without_positions, packed(texts)):
        assert_same(collect(model, [batch], "last3"), alone)


def test_an_answer_mask_counts_the_answers_alone():
    model, coder = decoder("llama", vocab_size=320, max_position_embeddings=64), tokenizer()
    (batch,) = tokens.encode(coder, RECORDS)
    with torch.no_grad():
        hidden = model.model(batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
    rows = hidden[batch["labels"] != -100]
    found = collect(model, [batch], "lm_head", mask=tokens.answer)["lm_head"].moments
    assert found.n == len(rows)
    torch.testing.assert_close(found.mean, rows.mean(0))
    torch.testing.assert_close(found.scatter, (rows - rows.mean(0)).T @ (rows - rows.mean(0)))


@pytest.mark.parametrize("per_class", ["means", "full"])
def test_rows_of_a_sample_get_its_group(per_class):
    model, coder = decoder("qwen2", vocab_size=320, max_position_embeddings=64), tokenizer(padding_side="left")
    batches = tokens.encode(coder, RECORDS, group="author", subject="name", batch_size=2)
    found = collect(model, batches, "mlp", per_class=per_class)
    assert found.classes == (4, 7)
    assert found.class_samples == (2, 1)
    name = "model.layers.2.mlp.down_proj"
    for place, author in enumerate((4, 7)):
        own = [record for record in RECORDS if record["author"] == author]
        alone = collect(model, tokens.encode(coder, own), "mlp")[name].moments
        assert found[name].class_rows[place] == alone.n
        torch.testing.assert_close(found[name].class_sums[place], alone.n * alone.mean)
        if per_class == "full":
            torch.testing.assert_close(found[name].class_moments[place].scatter, alone.scatter)
    head = collect(model, batches)
    assert head.head is None  # its rows are words, not groups
