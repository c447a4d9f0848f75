"""Ways in which files of people differ from what a reader expects: nothing is lost, changed or guessed in silence."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from data_toys import THINKING, chat, make_tokenizer, trained_text, whole_text, write_rows

from shardwise.data import Prepared, make_order, render_prompt
from shardwise.data.sources import find_files
from shardwise.data.tokenizer import Tokenizer, load_tokenizer
from shardwise.errors import DataError

Run = Callable[..., Prepared]


def reasons(prepared: Prepared) -> dict[str, list[int]]:
    return {f.reason: [line for _, line in f.places] for f in prepared.report.refused}


@pytest.mark.parametrize("answer", ["007", "NA", "nan", "null", "None", "true", "1e5", " 12 "])
def test_cells_of_a_table_stay_the_text_they_are(
    run: Run, tmp_path: Path, tokenizer: Tokenizer, answer: str
) -> None:
    (tmp_path / "t.csv").write_text(f"prompt,completion\nq:,{answer}\n")
    assert trained_text(run(str(tmp_path / "t.csv")), 0, tokenizer) == answer + "<|im_end|>"


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_tables_of_other_countries_are_read(
    run: Run, tmp_path: Path, tokenizer: Tokenizer, delimiter: str
) -> None:
    (tmp_path / "t.csv").write_bytes(
        f'prompt{delimiter}completion\r\n"two\r\nlines"{delimiter}"a{delimiter}b"\r\n'.encode("utf-8-sig")
    )
    prepared = run(str(tmp_path / "t.csv"))
    assert whole_text(prepared, 0, tokenizer) == f"two\r\nlinesa{delimiter}b<|im_end|>"


def test_line_ends_of_text_stay_as_they_are(run: Run, tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "t.txt").write_bytes(b"one\r\ntwo\rthree\n")
    assert whole_text(run(str(tmp_path / "t.txt")), 0, tokenizer) == "one\r\ntwo\rthree\n<|im_end|>"


def test_files_put_together_may_have_a_mark_in_the_middle(run: Run, tmp_path: Path) -> None:
    row = b"\xef\xbb\xbf" + json.dumps(chat("q", "a")).encode() + b"\r\n"
    (tmp_path / "t.jsonl").write_bytes(row * 3)
    assert run(str(tmp_path / "t.jsonl")).report.rows_train == 3


def test_another_encoding_is_named(run: Run, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_bytes((json.dumps(chat("q", "a")) + "\n").encode("utf-16"))
    with pytest.raises(DataError) as refused:
        run([{"path": str(tmp_path / "t.jsonl"), "format": "messages"}])
    assert "looks like UTF-16" in str(refused.value)


def test_a_broken_table_says_that_the_rest_is_not_read(run: Run, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text('prompt,completion\na,b\nc,"d\ne,f\n')
    with pytest.raises(DataError, match="the rest of the file cannot be read either"):
        run(str(tmp_path / "t.csv"))


def test_turns_and_system_texts_that_plain_rows_have_no_place_for_are_refused(run: Run) -> None:
    good = {"instruction": "i", "input": "", "output": "o", "history": [], "system": ""}
    prepared = run(
        [
            good,
            good | {"history": [["q", "a"]]},
            good | {"system": "Be brief."},
            good | {"history": "[]"},
        ]
    )
    assert prepared.report.rows_train == 2 and prepared.report.rows_refused == 2
    assert sorted(line for lines in reasons(prepared).values() for line in lines) == [2, 3]
    pairs = run(
        [{"question": "q", "response": "r"}, {"question": "q", "response": "r", "system_prompt": "s"}]
    )
    assert pairs.report.rows_train == 1 and list(reasons(pairs).values()) == [[2]]
    assert "system text" in next(iter(reasons(pairs)))


TOOLS = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}{{ '[' + c.function.name + ' ' + c.function.arguments|tojson + ']' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_calls_of_tools_in_turns_of_their_own_are_the_assistants(run: Run, tokenizer: Tokenizer) -> None:
    call = json.dumps({"name": "tide", "arguments": {"hour": "1"}})
    turns = [("human", "when?"), ("tool_call", call), ("tool_call", call), ("tool_response", "low")]
    turns += [("tool_response", "low"), ("gpt", "Low.")]
    row = {"conversations": [{"from": who, "value": text} for who, text in turns]}
    prepared = run([row], template=TOOLS)
    said = '[tide {"hour": "1"}]'
    assert trained_text(prepared, 0, tokenizer) == f"{said}{said}<|im_end|>Low.<|im_end|>"


@pytest.mark.parametrize("key", ["weight", "train", "loss"])
def test_turns_that_are_not_to_be_trained_are_not(run: Run, tokenizer: Tokenizer, key: str) -> None:
    row = chat("q", "one", "r", "two")
    row["messages"][1][key] = 0 if key == "weight" else False
    row["messages"][3][key] = 1 if key == "weight" else True
    assert trained_text(run([row]), 0, tokenizer) == "two<|im_end|>"
    row["messages"][1][key] = 2
    refused = run([row, chat("q", "a")])
    assert reasons(refused) == {"message 2: weight 2 is neither 0 nor 1": [1]}


def test_the_parts_of_a_folder_for_measuring_are_not_trained_on(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "given"
    (folder / "data").mkdir(parents=True)
    for name in (
        "train-00000.jsonl",
        "train-00001.jsonl",
        "test-00000.jsonl",
        "validation.jsonl",
        "more.jsonl",
    ):
        write_rows(folder / "data" / name, [chat(name, "a")])
    files, passed = find_files(str(folder))
    assert sorted(f.path.name for f in files) == ["more.jsonl", "train-00000.jsonl", "train-00001.jsonl"]
    assert len(passed) == 2 and all("test" in p or "validation" in p for p in passed)
    assert len(run(str(folder)).report.passed_over) == 2
    assert len(find_files(str(folder / "data" / "*.jsonl"))[0]) == 5  # a glob takes what it names
    for path in folder.rglob("train-*"):
        path.unlink()
    assert len(find_files(str(folder))[0]) == 3  # without a training split all of it is taken


def test_every_epoch_has_an_order_of_its_own_that_a_resumed_run_meets_again(run: Run) -> None:
    rows = run([chat(f"q{i}", "a" * (i % 5 + 1)) for i in range(24)]).train
    options = {"sequence_length": 128, "packing": True, "global_batch_size": 3, "epochs": 3, "seed": 1}
    order = make_order(rows, **options)
    each = order.steps_per_epoch
    epochs = [[order.step(e * each + i) for i in range(each)] for e in range(3)]
    assert len({str(e) for e in epochs}) == 3
    again = make_order(rows, **options)
    assert [again.step(i) for i in range(each + 1, 3 * each)] == [*epochs[1][1:], *epochs[2]]


def test_a_tokenizer_without_an_end_token_is_visible_in_the_report(run: Run, tmp_path: Path) -> None:
    model = make_tokenizer(tmp_path / "endless")
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (model / name).exists():
            tree = json.loads((model / name).read_text())
            tree.pop("eos_token", None)
            (model / name).write_text(json.dumps(tree))
    assert load_tokenizer(model).end is None
    report = run([{"prompt": "q", "completion": "a"}] * 2, model=model).report
    assert (report.ended, report.rows_train) == (0, 2)


def test_prompts_of_a_reasoning_template_begin_as_training_rows_do(run: Run, toy: Path) -> None:
    prepared = run([chat("q", "a")], template=THINKING)
    prompt = render_prompt(chat("q")["messages"], toy, THINKING)
    assert prepared.train.row(0)[0][: len(prompt)].tolist() == prompt.tolist()


def test_a_template_of_another_family_is_told_by_its_marks(run: Run, tmp_path: Path) -> None:
    assert run([chat("q", "a")], template="llama3").report.template == "llama3"
    source = (
        "{% for m in messages %}{{ '<|turn|>' + m['role'] + '\n' + m['content'] + '<|over|>' }}{% endfor %}"
    )
    told = run([chat("q", "a")], template=source).report.template
    assert (
        told is not None and "has no token for its <|turn|>, <|over|>: they are written as plain text" in told
    )


def test_very_many_turns_and_a_very_long_answer_are_one_row(run: Run, tokenizer: Tokenizer) -> None:
    turns = [text for i in range(300) for text in (f"q{i}", f"a{i}")]
    prepared = run([chat(*turns), chat("q", "é" * 50_000)])
    assert trained_text(prepared, 0, tokenizer) == "".join(f"a{i}<|im_end|>" for i in range(300))
    assert trained_text(prepared, 1, tokenizer) == "é" * 50_000 + "<|im_end|>"


def test_names_that_differ_only_in_case_and_hidden_files(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "f"
    folder.mkdir()
    write_rows(folder / "A.JSONL", [chat("q", "a")])
    write_rows(folder / ".hidden.jsonl", [{"messages": []}])
    (folder / "notes.pdf").write_text("no data")
    report = run(str(folder)).report
    assert report.rows_read == 1 and report.passed_over == ("notes.pdf",)


def _row(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", **more}]}


def test_lists_and_tools_kept_as_text_in_a_cell_are_read(
    run: Run, tmp_path: Path, tokenizer: Tokenizer
) -> None:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"messages": [json.dumps(_row()["messages"])], "tools": ["[]"]})
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    assert trained_text(run(str(tmp_path / "t.parquet")), 0, tokenizer) == "a<|im_end|>"
