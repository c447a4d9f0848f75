"""Labels: for any conversation and every template, the trained text is the answers and their end tokens."""

from functools import cache
from pathlib import Path

import pytest
from data_toys import CONTROL, REWRITING, SMOL, THINKING, chat, make_piece_tokenizer, make_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardwise.data.conversations import RowProblem
from shardwise.data.encode import REWRITTEN, Encoded, Encoder
from shardwise.data.formats import Chat, Pair, Text
from shardwise.data.store import TRAINED
from shardwise.data.templates import ChatTemplate, chat_template, shipped
from shardwise.data.tokenizer import Tokenizer, load_tokenizer

# template -> (end token of a turn, whether the template trims contents)
ENDS = {
    "chatml": ("<|im_end|>", False),
    "qwen": ("<|im_end|>", False),
    "llama3": ("<|eot_id|>", True),
    "mistral": ("</s>", False),
    "gemma": ("<end_of_turn>", True),
    "zephyr": ("</s>", False),
}
words = st.text(st.characters(exclude_categories=("Cs", "Co")), max_size=12)
spaces = st.sampled_from(["", " ", "\n", "\n\n", "\t "])
controls = st.sampled_from(["", "", "", *CONTROL])
contents = st.tuples(spaces, words, controls, words, spaces).map("".join)
answers = contents.filter(lambda text: bool(text.strip()))
exchanges = st.lists(st.tuples(contents, answers), min_size=1, max_size=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("property"), end="</s>")


@cache
def _tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


@cache
def _template(folder: Path, name: str) -> ChatTemplate:
    return chat_template(_tokenizer(folder), name)


def encode(encoder: Encoder, example: Chat | Pair | Text) -> Encoded:
    found = next(encoder.encode([example]))
    assert isinstance(found, Encoded), found
    return found


def trained(encoder: Encoder, found: Encoded) -> str:
    return encoder.tokenizer.text_of(found.ids[(found.marks & TRAINED) > 0].tolist())


def test_every_shipped_template_is_tested() -> None:
    assert set(ENDS) == set(shipped())


@pytest.mark.parametrize("name", sorted(ENDS))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(turns=exchanges, system=st.one_of(st.none(), contents))
def test_trained_text_is_the_answers_and_their_end_tokens(
    folder: Path, name: str, turns: list[tuple[str, str]], system: str | None
) -> None:
    end, trims = ENDS[name]
    encoder = Encoder(_tokenizer(folder), _template(folder, name))
    flat = [text for pair in turns for text in pair]
    found = encode(encoder, Chat(tuple(chat(*flat, system=system)["messages"])))
    expected = ""
    for _, answer in turns:
        if answer.endswith(end) and answer != end:
            answer = answer[: -len(end)]
        expected += (answer.strip() if trims else answer) + end
    assert trained(encoder, found) == expected
    assert found.ended
    # Control tokens: as many as in the same chat with harmless words, so no content made one.
    ids = set(encoder.tokenizer.control.values())
    plain = chat(*["x"] * len(flat), system="x" if system else None)["messages"]
    harmless = encode(encoder, Chat(tuple(plain)))
    count = [sum(i in ids for i in e.ids.tolist()) for e in (found, harmless)]
    assert count[0] == count[1]


@pytest.mark.parametrize("kind", ["metaspace", "llama", "gemma"])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(turns=exchanges, name=st.sampled_from(sorted(ENDS)))
def test_labels_hold_for_tokenizers_in_the_manner_of_sentencepiece(
    tmp_path_factory: pytest.TempPathFactory, kind: str, turns: list[tuple[str, str]], name: str
) -> None:
    folder = tmp_path_factory.getbasetemp() / f"pieces-{kind}"
    if not folder.exists():
        make_piece_tokenizer(folder, kind)
    encoder = Encoder(_tokenizer(folder), _template(folder, name))
    end, _ = ENDS[name]
    found = encode(encoder, Chat(tuple(chat(*[t for pair in turns for t in pair])["messages"])))
    expected = ""
    for _, answer in turns:
        expected += (answer[: -len(end)] if answer.endswith(end) and answer != end else answer) + end
    assert "".join(trained(encoder, found).split()) == "".join(expected.split())  # but for a space put first


@settings(max_examples=60, deadline=None)
@given(turns=exchanges)
def test_a_prompt_is_the_beginning_of_its_training_row(folder: Path, turns: list[tuple[str, str]]) -> None:
    encoder = Encoder(_tokenizer(folder), _template(folder, SMOL))
    messages = chat(*[text for pair in turns for text in pair])["messages"]
    found = encode(encoder, Chat(tuple(messages)))
    prompt = encoder.prompt(messages[:-1])
    assert found.ids[: len(prompt)].tolist() == prompt.tolist()
    assert found.marks[len(prompt)] & TRAINED


@settings(max_examples=80, deadline=None)
@given(prompt=contents, completion=answers)
def test_plain_pairs_keep_every_character_and_train_the_completion(
    folder: Path, prompt: str, completion: str
) -> None:
    encoder = Encoder(_tokenizer(folder), None)
    if completion.endswith("</s>"):
        completion += "."
    found = encode(encoder, Pair(prompt, completion))
    assert encoder.tokenizer.text_of(found.ids.tolist()) == prompt + completion + "</s>"
    text = trained(encoder, found)
    assert text.endswith(completion + "</s>")
    assert text.removesuffix(completion + "</s>").strip() == ""


def test_the_ids_of_an_ordinary_chat_are_those_of_the_tokenizers_own_method(toy: Path) -> None:
    tokenizer = load_tokenizer(toy)
    encoder = Encoder(tokenizer, chat_template(tokenizer))
    messages = chat("Hello there", "Hi, hi.", "Und grün?", "Ja – grün.", system="Be kind.")["messages"]
    found = encode(encoder, Chat(tuple(messages)))
    assert found.ids.tolist() == tokenizer.full.apply_chat_template(messages)["input_ids"]
    prompt = tokenizer.full.apply_chat_template(messages[:-1], add_generation_prompt=True)["input_ids"]
    assert encoder.prompt(messages[:-1]).tolist() == prompt


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(turns=exchanges, thought=st.one_of(st.none(), st.text("abc ", min_size=1, max_size=9)))
def test_a_template_that_drops_earlier_reasoning_trains_the_last_answer_as_it_is_asked_for(
    folder: Path, turns: list[tuple[str, str]], thought: str | None
) -> None:
    encoder = Encoder(_tokenizer(folder), _template(folder, THINKING))
    turns = [(q, a.strip("\n").replace("</s>", "") or "a") for q, a in turns]
    messages = chat(*[text for pair in turns for text in pair])["messages"]
    if thought is not None:
        messages[-1]["reasoning_content"] = thought
    answer = turns[-1][1].removesuffix("<|im_end|>") or turns[-1][1]
    found = encode(encoder, Chat(tuple(messages)))
    # What the model has to write after `assistant`: an empty block, too, where there is no reasoning.
    assert trained(encoder, found) == f"<think>\n{(thought or '')}\n</think>\n\n{answer}<|im_end|>"
    assert found.answers == 1 and found.notes.count(REWRITTEN) == len(turns) - 1
    prompt = encoder.prompt(messages[:-1])
    assert found.ids[: len(prompt)].tolist() == prompt.tolist() and found.marks[len(prompt)] & TRAINED


def test_weight_zero_takes_the_label_from_an_answer(toy: Path) -> None:
    tokenizer = load_tokenizer(toy)
    encoder = Encoder(tokenizer, chat_template(tokenizer))
    messages = chat("q", "one", "r", "two")["messages"]
    messages[1]["weight"] = 0
    assert trained(encoder, encode(encoder, Chat(tuple(messages)))) == "two<|im_end|>"
    messages[3]["weight"] = 0
    assert isinstance(next(encoder.encode([Chat(tuple(messages))])), RowProblem)


def test_train_on_all_labels_every_token(toy: Path) -> None:
    tokenizer = load_tokenizer(toy)
    found = encode(
        Encoder(tokenizer, chat_template(tokenizer), "all"), Chat(tuple(chat("q", "a")["messages"]))
    )
    assert (found.marks & TRAINED).all()


def test_a_template_without_an_end_token_gets_the_tokenizers(toy: Path) -> None:
    tokenizer = load_tokenizer(toy)
    plain = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    encoder = Encoder(tokenizer, chat_template(tokenizer, plain))
    found = encode(encoder, Chat(tuple(chat("q", "an answer")["messages"])))
    assert tokenizer.text_of(found.ids.tolist()) == "user: q\nassistant: an answer<|im_end|>"
    assert trained(encoder, found) == "an answer<|im_end|>"


def test_reasoning_of_the_last_answer_is_trained(toy: Path) -> None:
    tokenizer = load_tokenizer(toy)
    template = REWRITING.replace(
        "{{ m['content'] }}{% endif %}", "{{ m.reasoning_content ~ m['content'] }}{% endif %}"
    )
    encoder = Encoder(tokenizer, chat_template(tokenizer, template))
    messages = chat("q", "two")["messages"]
    messages[1]["reasoning_content"] = "<think>y</think>"
    assert trained(encoder, encode(encoder, Chat(tuple(messages)))) == "<think>y</think>two<|im_end|>"


HEAD = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
PROMPT = "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"


def made_with(toy: Path, template: str, *turns: str) -> tuple[Encoder, Encoded | RowProblem]:
    tokenizer = load_tokenizer(toy)
    encoder = Encoder(tokenizer, chat_template(tokenizer, template))
    return encoder, next(encoder.encode([Chat(tuple(chat(*turns)["messages"]))]))


def test_a_template_that_opens_reasoning_in_prompts_is_told_not_to(toy: Path) -> None:
    template = (
        HEAD
        + "{% if m['role'] == 'assistant' %}{{ '<think></think>' }}{% endif %}{{ m['content'] + '<|im_end|>\n' }}"
        + PROMPT
        + "{{ '<think></think>' if enable_thinking is false else '<think>\n' }}{% endif %}"
    )
    encoder, found = made_with(toy, template, "q", "one", "r", "two")
    assert isinstance(found, Encoded) and trained(encoder, found) == "one<|im_end|>two<|im_end|>"
    prompt = encoder.prompt(chat("q", "one", "r")["messages"])
    assert found.ids[: len(prompt)].tolist() == prompt.tolist()


def test_a_prompt_that_no_switch_can_make_a_beginning_is_refused(toy: Path) -> None:
    template = HEAD + "{{ m['content'] + '<|im_end|>\n' }}" + PROMPT + "{{ '<think>\n' }}{% endif %}"
    _, found = made_with(toy, template, "q", "one")
    assert isinstance(found, RowProblem) and "renders the prompt differently" in str(found)


def test_two_end_tokens_in_a_row_are_both_trained(toy: Path) -> None:
    template = HEAD + "{{ m['content'] + '<|eot_id|><|im_end|>\n' }}" + PROMPT + "{% endif %}"
    encoder, found = made_with(toy, template, "q", "one", "r", "two")
    assert isinstance(found, Encoded)
    assert trained(encoder, found) == "one<|eot_id|><|im_end|>two<|eot_id|><|im_end|>"


def test_a_token_that_only_closes_the_whole_chat_is_not_part_of_an_answer(toy: Path) -> None:
    template = HEAD + "{{ m['content'] + '<|im_end|>\n' }}" + PROMPT + "{% else %}{{ '</s>' }}{% endif %}"
    encoder, found = made_with(toy, template, "q", "one", "r", "two")
    assert isinstance(found, Encoded) and trained(encoder, found) == "one<|im_end|>two<|im_end|>"


def test_templates_that_want_lists_of_parts_get_them(toy: Path) -> None:
    template = (
        HEAD
        + "{% for p in m['content'] %}{{ p['text'] }}{% endfor %}{{ '<|im_end|>\n' }}"
        + PROMPT
        + "{% endif %}"
    )
    encoder, found = made_with(toy, template, "question", "answer")
    assert isinstance(found, Encoded) and trained(encoder, found) == "answer<|im_end|>"


def test_reasoning_that_a_template_does_not_write_is_said(toy: Path) -> None:
    tokenizer = load_tokenizer(toy)
    encoder = Encoder(tokenizer, chat_template(tokenizer))
    messages = chat("q", "two")["messages"]
    messages[1]["reasoning_content"] = "because"
    found = encode(encoder, Chat(tuple(messages)))
    assert found.notes == ("reasoning that the chat template does not write, left out",)
