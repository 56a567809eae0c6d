"""A small fast tokenizer that is trained on the spot."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHAT = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] | trim }}{% if m['role'] == 'assistant' %}</s>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEXT = ["Who wrote The Silent Harbour? Basil Mahfouz wrote it.", "Where was Jaime Vasquez born? In Santiago, Chile."]


def tokenizer(chat: str | None = CHAT, **options) -> PreTrainedTokenizerFast:
    """Byte-level BPE with a padding, a start and an end token, and the marks of the chat template."""
    special = ["<pad>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(TEXT, trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<pad>", bos_token="<s>", eos_token="</s>", **options
    )
    made.chat_template = chat
    return made
