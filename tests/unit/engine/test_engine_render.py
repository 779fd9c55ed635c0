"""Law 1 in prompts: recorded ids stand in them as they were drawn, and text never becomes a control token."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models

from clawhpc.engine.render import ChatRenderer, RecordedReply, RenderedPrompt
from clawhpc.engine.tokenizer import TextTokenizer, count_token_ids
from clawhpc.errors import UserError
from clawhpc.records import Conversation, Message, Tool, ToolCall
from tests.fakes.chat_tokenizer import CONTROL, watch_encoding, write_tokenizer

laws = settings(max_examples=60, deadline=None)
TOOL = Tool(
    name="write",
    description="Write a <tool_call> \ud800 file",
    parameters={"type": "object", "</think>": [1, "<think>"]},
)

LLAMA = (
    *("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"),
    *("<|start_header_id|>", "<|end_header_id|>"),
)
GEMMA = (
    *("<bos>", "<eos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>", "<|tool>", "<tool|>"),
    *("<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", "<|image>", "<|image|>", "<image|>"),
)
VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module", params=["gpt2 plain", "qwen plain", "gpt2 thinking", "qwen thinking"])
def renderer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    words, mode = request.param.split()
    folder = tmp_path_factory.mktemp(words)
    write_tokenizer(folder, words)
    return ChatRenderer(folder, renderer="qwen3", thinking=mode == "thinking")


def write_others(folder: Path, *control: str) -> Path:
    """The tokenizer with the control tokens of another family."""
    tokenizer = write_tokenizer(folder)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> ChatRenderer:
    folder = write_others(tmp_path_factory.mktemp("llama"), *LLAMA)
    return ChatRenderer(folder, renderer="llama-3", thinking=False)


def conversation(*messages: Message, tools: Sequence[Tool] = ()) -> Conversation:
    return Conversation(model="m", messages=messages, tools=tuple(tools))


def user(text: str) -> Message:
    return Message(role="user", text=text)


def assistant(text: str = "", **fields: object) -> Message:
    return replace(Message(role="assistant", text=text), **fields)  # type: ignore[arg-type]


def recorded(call_id: int, *ids: int) -> RecordedReply:
    return RecordedReply(call_id=call_id, completion_ids=ids)


texts = st.lists(
    st.sampled_from([*CONTROL, "<", "|im_end|>", "hello", " ", "\n", "\n\n", "é", "🙂", "\ud800", '"', "x = 1"]),
    max_size=6,
).map("".join)
completions = st.lists(st.integers(0, 408), max_size=8)
"""Any ids; the vocabulary has no other."""


@st.composite
def histories(draw: st.DrawFn, stop: int, end: int) -> tuple[list[Message], dict[int, RecordedReply]]:
    """Messages, and what was drawn for some of those of the assistant: nothing after a stop token."""
    messages, replies = [Message(role="system", text=draw(texts)), user(draw(texts))], {}
    for call_id in range(draw(st.integers(1, 4))):
        if draw(st.booleans()):
            ids = [token for token in draw(completions) if token not in (stop, end)]
            replies[len(messages)] = recorded(call_id, *ids, *draw(st.sampled_from([(), (stop,), (end,)])))
        messages.append(assistant(draw(texts), thinking=draw(texts)))
        for role in draw(st.lists(st.sampled_from(["user", "tool", "system"]), max_size=3)):
            messages.append(Message(role=role, text=draw(texts)))
    return messages, replies


@laws
@given(data=st.data())
def test_every_prompt_extends_the_tokens_of_the_call_before(renderer: ChatRenderer, data: st.DataObject) -> None:
    check_that_prompts_extend(renderer, data)


@laws
@given(data=st.data())
def test_so_it_does_in_a_chat_format_that_does_not_know_of_thinking(llama: ChatRenderer, data: st.DataObject) -> None:
    check_that_prompts_extend(llama, data)


def check_that_prompts_extend(renderer: ChatRenderer, data: st.DataObject) -> None:
    messages, replies = data.draw(histories(*renderer.stop_token_ids[:2]))
    whole = renderer.render(conversation(*messages, tools=[TOOL]), replies)
    assert whole.reencoded_replies == 0
    assert [graft.call_id for graft in whole.grafts] == [reply.call_id for reply in replies.values()]
    for graft, (index, reply) in zip(whole.grafts, replies.items(), strict=True):
        end = graft.start + graft.length
        assert whole.prompt_ids[graft.start : end] == reply.completion_ids
        earlier = {other: ids for other, ids in replies.items() if other < index}
        asked = renderer.render(conversation(*messages[:index], tools=[TOOL]), earlier)
        assert asked.prompt_ids == whole.prompt_ids[: graft.start]


@laws
@given(data=st.data())
def test_text_never_becomes_a_control_token(renderer: ChatRenderer, data: st.DataObject) -> None:
    messages, replies = data.draw(histories(*renderer.stop_token_ids))
    harmless = [replace(message, text="x", thinking="x" if message.thinking else "") for message in messages]
    harmless_tool = Tool(name="write", description="x", parameters={})
    drawn = renderer.render(conversation(*messages, tools=[TOOL]), replies)
    expected = renderer.render(conversation(*harmless, tools=[harmless_tool]), replies)
    assert control_ids(renderer, drawn) == control_ids(renderer, expected)


def control_ids(renderer: ChatRenderer, prompt: RenderedPrompt) -> list[int]:
    return [token for token in prompt.prompt_ids if renderer.decode([token]) in CONTROL]


@laws
@given(text=texts)
def test_text_stands_in_the_prompt_letter_by_letter(renderer: ChatRenderer, text: str) -> None:
    prompt = renderer.render(conversation(user(f"[{text}]")), {})
    assert f"user\n[{text.replace(chr(0xD800), chr(0xFFFD))}]<|im_end|>" in renderer.decode(prompt.prompt_ids)


@laws
@given(text=texts)
def test_the_format_itself_is_encoded_as_the_tokenizer_does(folder: Path, text: str) -> None:
    text = text.replace("\ud800", "")
    expected = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    assert TextTokenizer(folder).encode(text) == expected


@laws
@given(text=texts, arguments=st.dictionaries(texts, texts, max_size=2))
def test_an_encoded_reply_is_what_the_history_says_of_it(
    renderer: ChatRenderer, text: str, arguments: dict[str, str]
) -> None:
    call = ToolCall(id="c", name="write", arguments=json.dumps(arguments))
    reply = assistant(text, tool_calls=(call,))
    history = conversation(user("go"), reply, user("next"))
    encoded = recorded(0, *renderer.encode_reply(reply))
    as_drawn, as_text = renderer.render(history, {1: encoded}), renderer.render(history, {})
    assert as_drawn.prompt_ids == as_text.prompt_ids
    assert as_text.reencoded_replies == 0


def test_an_unrecorded_reply_counts_as_no_defect_and_keeps_the_grafts_around_it(renderer: ChatRenderer) -> None:
    stop = renderer.stop_token_ids[0]
    messages = (user("a"), assistant("b"), user("c"), assistant("made up"), user("d"), assistant("e"), user("f"))
    prompt = renderer.render(conversation(*messages), {1: recorded(0, 5, 6, stop), 5: recorded(1, 7, stop)})
    assert [prompt.prompt_ids[g.start : g.start + g.length] for g in prompt.grafts] == [(5, 6, stop), (7, stop)]
    assert "assistant\n" in renderer.decode(prompt.prompt_ids)
    assert "made up<|im_end|>" in renderer.decode(prompt.prompt_ids)


def test_replies_that_follow_each_other_directly_are_grafted_too(renderer: ChatRenderer) -> None:
    stop = renderer.stop_token_ids[0]
    prompt = renderer.render(
        conversation(user("a"), assistant("b"), assistant("c"), assistant("d")),
        {1: recorded(0, 5, stop), 2: recorded(1, 6)},
    )
    assert len(prompt.grafts) == 2
    assert prompt.reencoded_replies == 0
    decoded = renderer.decode(prompt.prompt_ids)
    assert decoded.count("<|im_start|>user") == 1
    assert decoded.count("<|im_start|>assistant\n") == 4


def test_a_reply_that_stopped_while_thinking_is_grafted_as_it_was(renderer: ChatRenderer, folder: Path) -> None:
    think = TextTokenizer(folder).convert_tokens_to_ids("<think>")
    ids = (think, 5, renderer.stop_token_ids[0])
    prompt = renderer.render(conversation(user("a"), assistant("b"), user("c")), {1: recorded(0, *ids)})
    graft = prompt.grafts[0]
    assert prompt.prompt_ids[graft.start : graft.start + graft.length] == ids
    assert prompt.reencoded_replies == 0


def test_a_history_that_cannot_be_appended_is_encoded_again_and_counted(renderer: ChatRenderer) -> None:
    prompt = renderer.render(conversation(assistant("b"), user("c")), {0: recorded(0, 5, 6)})
    assert prompt.grafts == ()
    assert prompt.reencoded_replies == 1


def test_thinking_that_a_harness_sends_back_to_a_policy_without_thinking_is_left_out(folder: Path) -> None:
    renderer = ChatRenderer(folder, renderer="qwen3", thinking=False)
    with_thinking = renderer.encode_reply(assistant("yes", thinking="hm"))
    assert with_thinking == renderer.encode_reply(assistant("yes"))


def test_what_conversations_share_is_encoded_once(folder: Path) -> None:
    renderer = ChatRenderer(folder, renderer="qwen3", thinking=False)
    for text in ("b", "c"):
        renderer.render(conversation(user("a"), assistant(text), user("d"), tools=[TOOL]), {})
    encoded = watch_encoding(renderer)
    renderer.render(conversation(user("a"), tools=[TOOL]), {})
    assert encoded == []
    renderer.render(conversation(user("another task"), tools=[TOOL]), {})
    assert sum(encoded) == len(TextTokenizer(folder).encode("user\nanother task"))


def test_how_much_is_new_in_a_prompt_is_known_before_it_is_rendered(folder: Path) -> None:
    renderer = ChatRenderer(folder, renderer="qwen3", thinking=False)
    first = conversation(user("a" * 1000), tools=[TOOL])
    assert renderer.num_new_chars(first, {}) > 1000
    reply = replace(recorded(0, 5, 6), prompt=renderer.render(first, {}))
    assert renderer.num_new_chars(first, {}) == 0
    grown = conversation(user("a" * 1000), assistant("b"), user("go on"), tools=[TOOL])
    assert renderer.num_new_chars(grown, {1: reply}) == len("go on")
    assert renderer.num_new_chars(grown, {}) == len("b" + "go on")
    edited = conversation(user("c" * 1000), *grown.messages[1:], tools=[TOOL])
    assert renderer.num_new_chars(edited, {1: reply}) > 1000


def test_a_turn_is_known_behind_any_head(folder: Path) -> None:
    renderer = ChatRenderer(folder, renderer="qwen3", thinking=False)
    reply = recorded(0, 5, renderer.stop_token_ids[0])
    one, other = (renderer.render(conversation(user(text), assistant("b"), user("c")), {1: reply}) for text in "xy")
    assert one.ids.runs[1] is other.ids.runs[1]


def test_a_prompt_goes_on_only_where_everything_before_it_is_exactly_the_same(folder: Path) -> None:
    """What is the same to a harness is not to a policy: a stripped text, another id, other tools."""
    renderer = ChatRenderer(folder, renderer="qwen3", thinking=False)
    stop = renderer.stop_token_ids[0]
    asked = renderer.render(conversation(user("a "), tools=[TOOL]), {})
    reply = replace(recorded(0, 5, stop), prompt=asked)
    for before, tools in ((user("a"), [TOOL]), (user("a "), [replace(TOOL, description="other")]), (user("a "), [])):
        grown = conversation(before, assistant("b"), user("c"), tools=tools)
        alone = ChatRenderer(folder, renderer="qwen3", thinking=False).render(grown, {1: recorded(0, 5, stop)})
        assert renderer.render(grown, {1: reply}).prompt_ids == alone.prompt_ids


def test_other_tools_make_another_prompt(folder: Path) -> None:
    renderer = ChatRenderer(folder, renderer="qwen3", thinking=False)
    one, other = (renderer.render(conversation(user("a"), tools=tools), {}) for tools in ([TOOL], []))
    assert one.prompt_ids != other.prompt_ids


def test_a_long_text_is_encoded_beside_other_threads(folder: Path) -> None:
    text = "def function(value):\n    return value\n" * 10_000
    encoding = threading.Thread(target=TextTokenizer(folder).encode, args=(text,))
    encoding.start()
    turns = 0
    while encoding.is_alive():
        time.sleep(0.001)
        turns += 1
    assert turns > 20, "it held the interpreter"


def test_threads_that_share_a_renderer_render_what_one_alone_does(folder: Path) -> None:
    long = [
        conversation(user(f"{number} lines\n" * 2000), assistant("b"), user("d"), tools=[TOOL]) for number in range(12)
    ]
    alone, shared = (ChatRenderer(folder, renderer="qwen3", thinking=False) for _ in range(2))
    with ThreadPoolExecutor(4) as threads:
        rendered = list(threads.map(lambda one: shared.render(one, {}).prompt_ids, long * 2))
    assert rendered == [alone.render(one, {}).prompt_ids for one in long] * 2


def test_token_ids_are_counted_with_the_control_tokens(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert count_token_ids(folder) == 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())


def test_a_folder_without_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        ChatRenderer(tmp_path, renderer="qwen3", thinking=False)


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"\xff", b'{"model": {"type": "other"}}'])
def test_a_broken_tokenizer_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(UserError, match=r"/tokenizer\.json: not a fast tokenizer: \S"):
        TextTokenizer(tmp_path)
    with pytest.raises(UserError, match=r"/tokenizer\.json: not a fast tokenizer: \S"):
        count_token_ids(tmp_path)


@pytest.mark.parametrize("name", ["qwen", "auto", "default", "gpt-oss", "custom", "llama-3", "deepseek-v4"])
def test_an_unknown_or_unfit_renderer_is_named(folder: Path, name: str) -> None:
    with pytest.raises(UserError, match=f"policy.renderer={name}"):
        ChatRenderer(folder, renderer=name, thinking=False)


def test_a_chat_format_that_does_not_know_of_thinking_cannot_be_told_to_think(folder: Path) -> None:
    with pytest.raises(UserError, match=r"policy\.renderer=llama-3: .*set policy\.thinking=false"):
        ChatRenderer(folder, renderer="llama-3", thinking=True)


def test_a_chat_format_that_would_encode_replies_again_is_refused(tmp_path: Path) -> None:
    """Its tool results name their tool, which stands in the reply before them."""
    folder = write_others(tmp_path, *GEMMA)
    with pytest.raises(UserError, match=r"policy\.renderer=gemma4: .*encoded again"):
        ChatRenderer(folder, renderer="gemma4", thinking=False)


def test_a_chat_format_that_opens_the_thinking_itself_is_taken(tmp_path: Path) -> None:
    folder = write_others(tmp_path, *VISION)
    renderer = ChatRenderer(folder, renderer="qwen3.5", thinking=True)
    thought, stop = TextTokenizer(folder).convert_tokens_to_ids("</think>"), renderer.stop_token_ids[0]
    prompt = renderer.render(conversation(user("a"), assistant("b"), user("c")), {1: recorded(0, 5, thought, 6, stop)})
    assert len(prompt.grafts) == 1


def test_a_tokenizer_without_the_formats_tokens_is_named(tmp_path: Path) -> None:
    Tokenizer(models.BPE()).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match=r"not a tokenizer for policy\.renderer=qwen3"):
        ChatRenderer(tmp_path, renderer="qwen3", thinking=False)
