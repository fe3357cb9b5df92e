"""Chats of agents, in common forms, with templates like those of published models."""

import json
import subprocess
import sys
from datetime import date

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.models import demo_tokenizer, small, write_jsonl
from support.places import ROOT

from rotationzoo.errors import RotationZooError
from rotationzoo.text.chats import ChatTemplate
from rotationzoo.text.documents import Tally, read_documents
from rotationzoo.text.rows import read_corpus, tokenize

CHATML = """
{%- if tools %}<|im_start|>tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{- '\\n' + m.content if m.content }}
{%- for call in m.tool_calls or [] %}
<call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
{%- endfor %}<|im_end|>
{% endfor %}"""
LLAMA = """
{%- for m in messages %}
{%- if 'tool_calls' in m %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{%- set call = m.tool_calls[0].function %}
<|header|>assistant: {"name": "{{ call.name }}", "parameters": {
{%- for key, value in call.arguments | items %}"{{ key }}": {{ value | tojson }}{% endfor %}}}
{%- else %}<|header|>{{ m.role }}: {{ m.content | trim }}
{%- endif %}{% endfor %}"""
STRICT = """
{%- for m in messages %}
{%- if m.role not in ['system', 'user', 'assistant', 'tool'] %}
{{- raise_exception('unknown role ' + m.role) }}
{%- endif %}[{{ m.role }}]
{%- for call in m.tool_calls or [] %}<call>{{ call.type + ' ' + call.function.name }}
{{- ' ' + call.function.arguments }}{% endfor %} {{ m.content }}
{% endfor %}"""
PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"
PARTS = """
{%- for m in messages %}[{{ m.role }}] {% for part in m.content %}{{ part.text }}{% endfor %}
{% endfor %}"""
TEMPLATES = {"chatml": CHATML, "llama": LLAMA, "strict": STRICT}
FILLER = {"role": "user", "content": "some words " * 400}
CITY = {"city": "Rome"}
ASKED = {"role": "user", "content": "The weather?"}
CALLED = {"id": "1", "type": "function", "function": {"name": "look", "arguments": CITY}}
IN_JSON = {"id": "1", "function": {"name": "look", "arguments": json.dumps(CITY)}}
SCHEMA = {"name": "look", "description": "looks", "parameters": {"type": "object"}}
SESSION = [ASKED, {"role": "assistant", "tool_calls": [CALLED]}, {"role": "tool", "content": "sun"}]


def tokenizer_with(template):
    tokenizer = demo_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def text_of(path, template):
    """The text of the first chat of a file, without start tokens."""
    data, tokenizer = small(path), tokenizer_with(template)
    (sample,) = read_documents(data, Tally())
    return tokenizer.decode(tokenize(sample, ChatTemplate(tokenizer), data))


def chat_text(tmp_path, template, messages, column="messages", **columns):
    return text_of(write_jsonl(tmp_path / "c.jsonl", [{column: messages, **columns}]), template)


def calling(**fields):
    return [ASKED, {"role": "assistant", **fields}, *SESSION[2:]]


CALLS = {
    "no content": calling(tool_calls=[CALLED]),
    "null content": calling(content=None, tool_calls=[CALLED]),
    "arguments in JSON": calling(content="", tool_calls=[IN_JSON]),
    "a function alone": calling(tool_calls=[CALLED["function"]]),
}


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("form", CALLS)
def test_a_call_needs_no_content_and_its_arguments_are_what_the_template_reads(
    form, template, tmp_path
):
    text = chat_text(tmp_path, TEMPLATES[template], CALLS[form])
    assert "look" in text
    assert '{"city": "Rome"}' in text
    assert "None" not in text


def test_a_table_has_the_keys_of_all_messages(tmp_path):
    keys = "role", "content", "tool_calls"
    session = [{key: message.get(key) for key in keys} for message in SESSION]
    path = tmp_path / "sessions.parquet"
    pq.write_table(pa.table({"messages": [session]}), path)
    assert text_of(path, LLAMA) == chat_text(tmp_path, LLAMA, SESSION)


def test_chats_of_sharegpt_are_converted(tmp_path):
    said = {
        "human": "The weather?",
        "function_call": json.dumps({"name": "look", "arguments": CITY}),
        "observation": "sun",
    }
    shared = [{"from": role, "value": text} for role, text in said.items()]
    expected = chat_text(tmp_path, STRICT, [{"role": "system", "content": "Be kind."}, *SESSION])
    assert "[system] Be kind." in expected
    spoken = [{"from": "system", "value": "Be kind."}, *shared]
    assert chat_text(tmp_path, STRICT, spoken, "conversations") == expected
    assert chat_text(tmp_path, STRICT, shared, "conversations", system="Be kind.") == expected


@pytest.mark.parametrize("tools", [[SCHEMA], json.dumps([SCHEMA]), [json.dumps(SCHEMA)]], ids=str)
def test_tools_are_handed_to_the_template(tools, tmp_path):
    text = chat_text(tmp_path, CHATML, SESSION, tools=tools)
    assert '{"type": "function", "function": {"name": "look", "description": "looks"' in text
    wrapped = [{"type": "function", "function": SCHEMA}]
    assert chat_text(tmp_path, CHATML, SESSION, tools=wrapped) == text


def test_a_template_that_leaves_tools_out_is_noted(tmp_path):
    rows = [{"messages": [FILLER, ASKED], "tools": [SCHEMA]}]
    path = write_jsonl(tmp_path / "tools.jsonl", rows)
    says = "the chat template does not write all tools and calls"
    assert says in read_corpus(small(path), tokenizer_with(LLAMA)).note
    assert says not in str(read_corpus(small(path), tokenizer_with(CHATML)).note)


def test_parts_are_joined_unless_the_template_takes_them(tmp_path):
    chat = [{"role": "user", "content": [{"type": "text", "text": each} for each in ("a b", "c")]}]
    for template in TEMPLATES.values():
        text = chat_text(tmp_path, template, chat)
        assert "a b\nc" in text
        assert "type" not in text
    assert "[user] a bc" in chat_text(tmp_path, PARTS, chat)


def test_a_tool_may_answer_with_a_table_where_the_template_writes_it(tmp_path):
    answer = [ASKED, {"role": "tool", "content": {"sky": "blue"}}]
    template = "{% for m in messages %}{{ m.content | tojson }}{% endfor %}"
    assert '{"sky": "blue"}' in chat_text(tmp_path, template, answer)
    with pytest.raises(RotationZooError, match="it prints parts of a content as Python objects"):
        chat_text(tmp_path, STRICT, answer)


BAD = {
    "message": {"messages": [{"role": "user"}]},
    "template": {"messages": [{"role": "critic", "content": "hm"}]},
    "image": {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
    "column": {"other": "words"},
    "tool": {"messages": [ASKED], "tools": "look"},
    "number": {"messages": 5},
}


@pytest.mark.parametrize("bad", BAD)
def test_one_bad_row_of_a_hundred_is_left_out(bad, tmp_path):
    rows = [{"messages": [{"role": "user", "content": "some words " * 40}]}] * 99
    path = write_jsonl(tmp_path / "rows.jsonl", [*rows[:36], BAD[bad], *rows[36:]])
    corpus = read_corpus(small(path, tokens=4096 * 64), tokenizer_with(STRICT))
    assert "1 of 100 rows left out, the first in line 37" in corpus.note
    path = write_jsonl(tmp_path / "rows.jsonl", [*rows[:98], BAD[bad]])
    with pytest.raises(RotationZooError, match="1 of 99 rows cannot be used, the first in line 99"):
        read_corpus(small(path, tokens=4096 * 64), tokenizer_with(STRICT))


def test_a_line_that_is_no_json_is_left_out(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text("\n" + '"some words"\n' * 99 + '{"text": \n')
    note = read_corpus(small(path, tokens=4096), demo_tokenizer()).note
    assert note.endswith("1 of 100 rows left out, the first in line 101")


def test_a_source_of_bad_rows_is_not_read_to_its_end(tmp_path, monkeypatch):
    def endless(path):
        while True:
            yield {"messages": 5}

    monkeypatch.setattr("rotationzoo.text.documents._json_lines", endless)
    path = write_jsonl(tmp_path / "stream.jsonl", [])
    says = "101 of 101 rows cannot be used, the first in line 1"
    with pytest.raises(RotationZooError, match=says):
        read_corpus(small(path), tokenizer_with(STRICT))


def test_the_template_process_ends_silently(tmp_path):
    """`calibrate` takes SIGTERM for an interrupt, and daemons are ended by it."""
    (tmp_path / "ends.py").write_text(
        "import signal\n"
        "from types import SimpleNamespace\n"
        "from rotationzoo.text.chats import ChatTemplate\n"
        "class Tokenizer(SimpleNamespace):\n"
        "    def apply_chat_template(self, messages, tokenize):\n"
        "        return 'as text'\n"
        "signal.signal(signal.SIGTERM, signal.default_int_handler)\n"
        "print(ChatTemplate(Tokenizer()).render([{'role': 'user', 'content': 'a'}]))\n"
    )
    words = [sys.executable, tmp_path / "ends.py"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("as text\n", "")


# ---- templates that write the date


DATED = "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}"
DATED += "{% endif %}Today: {{ date_string }}, {{ strftime_now('%A %H:%M:%S') }}." + PLAIN


def test_a_template_writes_the_day_that_it_is_given(tmp_path):
    template = ChatTemplate(tokenizer_with(DATED), "2024-02-29")
    assert template.render([FILLER]).startswith("Today: 29 Feb 2024, Thursday 00:00:00.")
    assert template.written_day == "2024-02-29"
    path = write_jsonl(tmp_path / "chats.jsonl", [{"messages": [FILLER]}] * 9)

    def read(form: str, day: str | None):
        corpus = read_corpus(small(path, date=day), tokenizer_with(form))
        return corpus.date, corpus.fingerprint

    first, second = read(DATED, "2024-02-29"), read(DATED, None)
    assert (first[0], second[0]) == ("2024-02-29", date.today().isoformat())
    assert first[1] != second[1]
    assert read(PLAIN, "2024-02-29") == read(PLAIN, None)
    assert read(PLAIN, None)[0] is None
