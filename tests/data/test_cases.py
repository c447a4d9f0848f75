"""Failures that people reported of other tools, each as the smallest input that shows it."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from data_toys import INPUTS, REWRITING, chat, make_tokenizer, trained_text, whole_text, write_rows

from shardwise.data import Prepared, make_order, render_prompt
from shardwise.data.streaming import stream_steps
from shardwise.data.tokenizer import Tokenizer, load_tokenizer
from shardwise.errors import DataError, RecipeError
from shardwise.plan.model import planned_steps
from shardwise.recipe import parse_recipe
from shardwise.recipe.schedule import learning_rate

Run = Callable[..., Prepared]
TOOLS_OBJECT = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}"
    "{{ c['function']['name'] + ' ' + c['function']['arguments']|tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOLS_STRING = TOOLS_OBJECT.replace("c['function']['arguments']|tojson", "c['function']['arguments']")


def file(name: str) -> str:
    return str(INPUTS / name)


def places(prepared: Prepared) -> list[int]:
    return sorted(line for f in prepared.report.refused for _, line in f.places)


def test_d01_the_end_token_is_trained_although_it_is_the_pad_token(run: Run, tokenizer: Tokenizer) -> None:
    prepared = run([chat("a", "b"), chat("a longer question", "a longer answer")])
    assert tokenizer.full.pad_token_id == tokenizer.end
    for i in range(2):
        _, labels = prepared.train.row(i)
        assert (labels == tokenizer.end).sum() == 1
        assert labels[labels != -100][-1] == tokenizer.end


def test_d02_prompt_and_completion_end_with_one_trained_end_token(run: Run, tokenizer: Tokenizer) -> None:
    prepared = run(file("sft_4rows_var_len.jsonl"))
    assert trained_text(prepared, 0, tokenizer) == " a<|im_end|>"
    assert prepared.report.ended == 4
    already = run([{"prompt": "Say a", "completion": " a<|im_end|>"}])
    assert (already.train.row(0)[0] == tokenizer.end).sum() == 1


def test_d02_a_cut_row_gets_no_end_token(run: Run, tokenizer: Tokenizer) -> None:
    prepared = run(file("sft_4rows_var_len.jsonl"), sequence_length=32)
    assert prepared.report.truncated == 2 and prepared.report.ended == 2
    cut = int(np.argmax(prepared.train.lengths == 32))
    assert tokenizer.end not in prepared.train.row(cut)[0]


def test_d03_rows_without_a_trainable_token_are_counted_and_dropped(run: Run) -> None:
    prepared = run(file("long_prompt_short_answer.jsonl"), sequence_length=32)
    assert prepared.report.rows_train == 1 and prepared.report.rows_dropped == 1
    assert prepared.report.dropped[0].places == ((file("long_prompt_short_answer.jsonl"), 1),)
    with pytest.raises(DataError, match="2 of 2 rows have no trainable token"):
        run([{"prompt": "p" * 50, "completion": "a"}] * 2, sequence_length=32)


def test_d04_answers_are_found_in_a_template_without_generation_marks(run: Run, tokenizer: Tokenizer) -> None:
    prepared = run(file("multi_turn_4.jsonl"))
    assert trained_text(prepared, 0, tokenizer) == "The Vell.<|im_end|>Lake Orn.<|im_end|>"


def test_d04_an_earlier_answer_that_the_template_rewrites_is_not_trained(
    run: Run, tokenizer: Tokenizer
) -> None:
    row = chat("q", "<think>x</think>one", "r", "<think>y</think>two")
    prepared = run([row, chat("q", "one", "r", "two")], template=REWRITING)
    assert trained_text(prepared, 0, tokenizer) == "<think>y</think>two<|im_end|>"
    assert trained_text(prepared, 1, tokenizer) == "one<|im_end|>two<|im_end|>"
    assert [(f.count, f.places[0][1]) for f in prepared.report.notes] == [(1, 1)]


def test_d05_one_begin_token_in_training_and_in_prompts(tmp_path: Path, run: Run) -> None:
    template = (
        "{{ bos_token }}{% for m in messages %}{{ m['role'] + ':' + m['content'] + eos_token }}{% endfor %}"
    )
    model = make_tokenizer(tmp_path / "bos", template, end="</s>", adds_bos=True)
    tokenizer = load_tokenizer(model)
    begin = tokenizer.control["<s>"]
    assert tokenizer.encode(["x"], special=True)[0].ids[0] == begin
    rows = run([chat("hi", "yes")], model=model).train
    pairs = run([{"prompt": "hi", "completion": "yes"}], model=model).train
    prompt = render_prompt([{"role": "user", "content": "hi"}], model)
    for ids in (rows.row(0)[0], pairs.row(0)[0], prompt):
        assert (ids == begin).sum() == 1 and ids[0] == begin
    assert rows.row(0)[0][: len(prompt)].tolist() == prompt.tolist()


def test_d09_tool_calls_keep_only_their_own_arguments(run: Run, tmp_path: Path, tokenizer: Tokenizer) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [json.loads(line) for line in Path(file("tool_args_plain.jsonl")).read_text().splitlines()]
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    with (
        pyarrow.OSFile(str(tmp_path / "rows.arrow"), "wb") as out,
        pyarrow.ipc.new_stream(out, table.schema) as to,
    ):
        to.write_table(table)
    texts = []
    for source in (
        file("tool_args_plain.jsonl"),
        str(tmp_path / "rows.parquet"),
        str(tmp_path / "rows.arrow"),
    ):
        prepared = run(source, template=TOOLS_OBJECT)
        texts.append([whole_text(prepared, i, tokenizer) for i in range(2)])
    assert texts[0] == texts[1] == texts[2]
    assert '{"lamp": 3, "level": 20}' in texts[0][0] and '{"hour": "12:00"}' in texts[0][1]


def test_d10_a_byte_order_mark_changes_nothing(run: Run, tmp_path: Path, tokenizer: Tokenizer) -> None:
    with_mark, without = (run(file(f"tool_args_{k}.jsonl"), template=TOOLS_OBJECT) for k in ("bom", "plain"))
    for i in range(2):
        assert with_mark.train.row(i)[0].tolist() == without.train.row(i)[0].tolist()
    (tmp_path / "bom.csv").write_bytes(b"\xef\xbb\xbfprompt,completion\nq,a\n")
    assert trained_text(run(str(tmp_path / "bom.csv")), 0, tokenizer) == "a<|im_end|>"


@pytest.mark.parametrize("template", [TOOLS_OBJECT, TOOLS_STRING])
def test_d11_arguments_as_text_and_as_object_render_the_same(
    run: Run, template: str, tokenizer: Tokenizer
) -> None:
    row = json.loads(Path(file("tool_args_string.jsonl")).read_text())
    other = json.loads(json.dumps(row))
    other["messages"][1]["tool_calls"][0]["function"]["arguments"] = {"hour": "12:00"}
    prepared = run([row, other], template=template)
    assert prepared.train.row(0)[0].tolist() == prepared.train.row(1)[0].tolist()
    assert 'tide {"hour": "12:00"}<|im_end|>' in trained_text(prepared, 0, tokenizer)


def test_d11_malformed_arguments_are_named_by_row_and_message(run: Run) -> None:
    row = json.loads(Path(file("tool_args_string.jsonl")).read_text())
    row["messages"][1]["tool_calls"][0]["function"]["arguments"] = '{"hour": '
    prepared = run([chat("q", "a"), row], template=TOOLS_OBJECT)
    assert places(prepared) == [2]
    assert prepared.report.refused[0].reason.startswith("message 2: tool arguments are not valid JSON")


def test_d12_null_content_never_becomes_a_word(run: Run, tokenizer: Tokenizer) -> None:
    prepared = run(file("tool_args_string.jsonl"), template=TOOLS_OBJECT)
    assert "None" not in whole_text(prepared, 0, tokenizer)
    assert 7 in places(run(file("roles_odd.jsonl")))


def test_d13_blank_cells_are_no_input_and_no_answer(run: Run, tokenizer: Tokenizer) -> None:
    prepared = run(file("blank_cells.csv"))
    texts = [whole_text(prepared, i, tokenizer) for i in range(3)]
    assert ["### Input:" in t for t in texts] == [False, False, True]
    assert not any(word in t for t in texts for word in ("None", "nan"))
    assert places(prepared) == [5]
    pairs = run(file("pairs_nulls.jsonl"))
    assert places(pairs) == [2, 3, 4, 5] and pairs.report.rows_train == 1


def test_d15_a_field_that_is_null_for_long_does_not_matter(run: Run, tmp_path: Path) -> None:
    row = json.dumps({"prompt": "q", "completion": "a", "filler": "x" * 850, "note": None})
    late = json.dumps({"prompt": "q", "completion": "a", "note": "late"})
    (tmp_path / "late.jsonl").write_text(f"{row}\n" * 13_000 + late)
    assert run(str(tmp_path / "late.jsonl")).report.rows_read == 13_001


def test_d16_broken_lines_are_named_with_file_line_column_and_excerpt(run: Run, tmp_path: Path) -> None:
    with pytest.raises(DataError) as one:
        run(file("bad_line3.jsonl"))
    assert "bad_line3.jsonl, line 3, column 33" in one.value.what and '"p3"' in one.value.why
    with pytest.raises(DataError, match=r"latin1.jsonl, line 1, column 15: byte 0xe9 is not UTF-8"):
        run(file("latin1.jsonl"))
    with pytest.raises(DataError, match=r"two_on_one_line.jsonl, line 1, column 34"):
        run(file("two_on_one_line.jsonl"))
    with pytest.raises(DataError, match="no rows"):
        run(file("empty.jsonl"))
    (tmp_path / "many.jsonl").write_text('{"text": "a"}\n' + "{\n" * 7)
    with pytest.raises(DataError, match="7 lines cannot be read"):
        run(str(tmp_path / "many.jsonl"))
    assert not list((tmp_path / "cache").rglob("done.json"))


def test_d16_odd_but_readable_files_load(run: Run, tmp_path: Path) -> None:
    assert run(file("array_in_jsonl.jsonl")).report.rows_train == 2
    assert run(file("crlf_blank.jsonl")).report.rows_train == 3
    assert run(file("rows.jsonl.gz")).report.rows_train >= 1
    huge = write_rows(
        tmp_path / "huge.jsonl", [{"prompt": "q", "completion": "a", "unused": "y" * 30_000_000}]
    )
    assert run(str(huge)).report.rows_train == 1


def test_d17_other_fields_formats_and_types(run: Run, tmp_path: Path) -> None:
    assert run(file("extra_field.jsonl")).report.rows_train == 3
    flip = run(file("type_flip.jsonl"))
    assert places(flip) == [2] and "a number (10)" in flip.report.refused[0].reason
    write_rows(tmp_path / "one.jsonl", [{"prompt": "a", "completion": "b"}])
    write_rows(tmp_path / "two.jsonl", [{"instruction": "a", "output": "b"}])
    with pytest.raises(DataError, match="mixes two formats") as mixed:
        run(str(tmp_path / "*.jsonl"))
    assert "one.jsonl" in mixed.value.why and "two.jsonl" in mixed.value.why
    both = run([{"path": str(tmp_path / "one.jsonl")}, {"path": str(tmp_path / "two.jsonl")}])
    assert both.report.rows_train == 2


@pytest.mark.parametrize(("asked", "held"), [(0, 0), (1, 1), (9, 9), (0.1, 1), (0.5, 5), (0.99, 0)])
def test_d19_counts_and_shares_of_held_out_rows(run: Run, asked: float, held: int) -> None:
    prepared = run([chat(f"q{i}", f"a{i}") for i in range(10)], validation=asked)
    assert (prepared.report.rows_validation, prepared.report.rows_train) == (held, 10 - held)
    assert (prepared.validation is None) == (held == 0)


def test_d19_nothing_left_to_train_on_is_refused_with_both_numbers(run: Run) -> None:
    rows = [chat(f"q{i}", f"a{i}") for i in range(10)]
    for asked in (10, 2000):
        with pytest.raises(DataError) as refused:
            run(rows, validation=asked)
        assert str(asked) in refused.value.what and "10 rows" in refused.value.why
    with pytest.raises(RecipeError, match=r"1\.0: a share lies between 0 and 1; write 1 without"):
        run(rows, validation=1.0)
    single = run(file("one_row.jsonl"), validation=0.1)
    assert single.validation is None and single.report.rows_train == 1
    assert "leaves nothing to train on" in single.report.validation


def test_d20_a_small_set_still_has_a_step(run: Run) -> None:
    eight = run([chat(f"q{i}", "a") for i in range(8)])
    order = make_order(eight.train, sequence_length=64, packing=False, global_batch_size=16, epochs=1)
    assert order.steps == 1 and len(order.step(0)) == 8
    five = run([chat(f"q{i}", "a") for i in range(5)], sequence_length=2048)
    packed = make_order(five.train, sequence_length=2048, packing=True, global_batch_size=4, epochs=3)
    assert packed.steps == 3 and sorted(packed.step(0)[0]) == [0, 1, 2, 3, 4]
    assert (
        planned_steps(8, 16, 1.0, None) == 1 and planned_steps(1, 4, 3.0, None) == 3
    )  # where it is estimated


def test_d21_the_whole_shared_beginning_of_a_preference_pair_is_its_prompt(run: Run) -> None:
    from shardwise.data.build import find_part
    from shardwise.data.check import check_pairs

    found = check_pairs([find_part(file("dpo_multi_turn.jsonl"), "auto")]).first
    assert found is not None
    assert [m["content"] for m in found.prompt] == ["u1", "a1", "u2"]
    assert (found.chosen[0]["content"], found.rejected[0]["content"]) == ("GOOD", "BAD")
    with pytest.raises(DataError, match="preference pairs"):
        run(file("dpo_multi_turn.jsonl"))


def test_d23_the_first_answer_token_is_trained_whatever_the_spacing(run: Run, tokenizer: Tokenizer) -> None:
    for prompt, completion, trained in (
        ("Answer: ", "hi", " hi<|im_end|>"),  # the space belongs to the token " hi"
        ("Answer:", " hi", " hi<|im_end|>"),
        ("Answer:\n", "hi", "hi<|im_end|>"),
        (
            "xa",
            "bz",
            "bz<|im_end|>",
        ),  # "ab" is one token; taken apart, or the answer's b would not be trained
    ):
        prepared = run([{"prompt": prompt, "completion": completion}])
        assert trained_text(prepared, 0, tokenizer) == trained
        assert whole_text(prepared, 0, tokenizer) == prompt + completion + "<|im_end|>"


def test_d24_lone_surrogates_are_replaced_and_named(run: Run, tokenizer: Tokenizer) -> None:
    prepared = run(file("lone_surrogate.jsonl"))
    assert trained_text(prepared, 0, tokenizer) == "ok \ufffd end<|im_end|>"
    assert [(f.count, f.places[0][1]) for f in prepared.report.notes] == [(1, 1)]


@pytest.mark.parametrize("length", range(15, 40))
def test_d24_no_cut_inside_a_character(run: Run, tokenizer: Tokenizer, length: int) -> None:
    prepared = run(file("emoji_cut.jsonl"), sequence_length=length)
    text = whole_text(prepared, 0, tokenizer)
    assert "\ufffd" not in text and length - 3 <= prepared.train.lengths[0] <= length


def test_d25_the_number_of_steps_is_known_before_the_run(run: Run) -> None:
    rows = run([chat(f"q{i}", "a" * i) for i in range(1, 21)]).train
    order = make_order(rows, sequence_length=128, packing=False, global_batch_size=3, epochs=2)
    assert order.steps == 14 and [len(order.step(i)) for i in range(14)] == [3, 3, 3, 3, 3, 3, 2] * 2


def test_d25_a_stream_needs_its_number_of_steps_and_the_rate_ends_with_them(run: Run, tmp_path: Path) -> None:
    write_rows(tmp_path / "s.jsonl", [chat(f"q{i}", "a") for i in range(20)])
    tree = {"model": "x", "data": {"train": str(tmp_path / "s.jsonl"), "streaming": True}}
    with pytest.raises(RecipeError, match=r"training.max_steps or training.max_tokens"):
        parse_recipe(json.dumps(tree | {"training": {"epochs": 2.0}}))
    recipe = parse_recipe(
        json.dumps(tree | {"training": {"max_tokens": 10_000}, "schedule": {"warmup": 0.05}})
    )
    steps = stream_steps(recipe, 512, 4)
    rates = [learning_rate(recipe.schedule, 1.0, step, steps) for step in range(steps)]
    assert steps == 5 and max(rates) == rates[0] == 1.0 and rates[-1] == 0.0


def test_d26_system_text_is_never_lost_and_seen_once(run: Run, tmp_path: Path) -> None:
    row = chat("hi", "My, my.", system="Answer in rhyme.")
    for template in (None, "gemma", "chatml", "llama3", "mistral", "qwen", "zephyr"):
        model = make_tokenizer(tmp_path / f"m{template}")
        prepared = run([row], model=model, template=template)
        tokenizer = load_tokenizer(model)
        text = whole_text(prepared, 0, tokenizer)
        assert text.count("Answer in rhyme.") == 1
        prompt = render_prompt(row["messages"][:-1], tokenizer, template)
        assert prepared.train.row(0)[0][: len(prompt)].tolist() == prompt.tolist()
        assert ("before the first user turn" in prepared.report.system) == (template == "gemma")
    assert "You are a helpful toy" in run([chat("hi", "a")]).report.system


def test_d27_bad_conversations_are_named_and_the_good_ones_used(run: Run, tokenizer: Tokenizer) -> None:
    prepared = run(file("roles_odd.jsonl"))
    assert places(prepared) == [1, 2, 3, 4, 7, 8]
    assert [prepared.train.source(i)[1] for i in range(2)] == [5, 6]
    assert trained_text(prepared, 1, tokenizer) == "hello<|im_end|>"
    odd = run(
        [
            chat("q", "a"),
            {"messages": [{"role": "user", "content": "q"}, {"role": "narrator", "content": "a"}]},
        ]
    )
    assert odd.report.refused[0].reason == 'message 2 has the unknown role "narrator"'


def test_l04_an_epoch_ends_with_a_smaller_step(run: Run) -> None:
    rows = run([chat(f"q{i}", "a") for i in range(5)]).train
    for world_size in (1, 2):
        order = make_order(rows, sequence_length=64, packing=False, global_batch_size=4, epochs=2)
        assert order.steps == 4 and order.steps_per_epoch == 2
        assert [len(order.step(i)) for i in range(4)] == [4, 1, 4, 1]
        counts = {len(order.micro_batches(1, rank, world_size, 1)) for rank in range(world_size)}
        assert counts == {1}


def test_l16_a_token_without_an_embedding_is_named(run: Run, tokenizer: Tokenizer) -> None:
    largest = max(tokenizer.control["<|im_start|>"], tokenizer.control["<|im_end|>"])
    assert run([chat("q", "a")], vocabulary=largest + 1)
    with pytest.raises(DataError, match=r"'<\|im_end\|>' with id"):
        run([chat("q", "a")], vocabulary=largest)


def test_r03_every_rank_has_as_many_micro_batches(run: Run) -> None:
    rows = run([chat(f"q{i}", "a" * (i + 1)) for i in range(5)]).train
    order = make_order(rows, sequence_length=64, packing=False, global_batch_size=5, epochs=1)
    shares = [order.micro_batches(0, rank, 2, 1) for rank in range(2)]
    assert [len(s) for s in shares] == [3, 3] and shares[1][2] == ()
    assert sorted(b for share in shares for micro in share for b in micro) == sorted(order.step(0))
