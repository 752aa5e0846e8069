# SPDX-License-Identifier: Apache-2.0
"""Rules of a server and of its requests; the file of rule trie from the command line; no engine is started."""

from __future__ import annotations

import json
import re
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.sample.logits_processor import validate_logits_processors_parameters

from vllm_ext.cli.main import app
from vllm_ext.config import rules, runners
from vllm_ext.data.model_files import ModelVocabulary
from vllm_ext.engine.composed import scheduler, worker
from vllm_ext.engine.v1 import logits_processor
from vllm_ext.kernels import trie
from vllm_ext.samplers import trie_file
from vllm_ext.samplers.extract import SpanConstraint
from vllm_ext.samplers.passage import Passages

ANSWERS = ["yes", "no", "not at all", "not yet", "yes"]


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.fixture(scope="module")
def made(slice_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trie")
    (folder / "in.txt").write_text("\n".join([*ANSWERS, "", ""]))
    built = run(
        "trie", "build", "--tokenizer", slice_dir, "--output", folder / "short.trie", folder / "in.txt"
    )
    assert built.exit_code == 0, built.output
    assert "4 answers of " in built.output
    assert "left out: empty answers: 1" in built.output
    assert "left out: answers that are there already: 1" in built.output
    config = {"vllm_ext": {"rules": {"trie": {"files": {"short": str(folder / "short.trie")}}}}}
    assert f"--additional-config '{json.dumps(config)}'" in built.output
    return folder / "short.trie"


def engine_config(slice_dir: str, given: Any, **options: Any) -> Any:
    return EngineArgs(
        model=slice_dir, dtype="float32", max_model_len=256, additional_config={"vllm_ext": given}, **options
    ).create_engine_config()


def test_each_answer_is_in_the_file(made: Path, slice_dir: str) -> None:
    from vllm_ext.data.model_files import load_tokenizer

    tokenizer = load_tokenizer(slice_dir)
    found, header = trie_file.open_trie(made)
    assert header.num_sequences == 4
    for answer in ANSWERS:
        ids = tokenizer.encode(answer, add_special_tokens=False).ids
        assert found.final[trie.follow(found, np.array(ids, dtype=np.int32))]
    info = run("trie", "info", made)
    assert info.exit_code == 0
    assert "4 answers of " in info.output
    assert header.tokenizer_hash in info.output


def test_token_ids_and_text_make_the_same_file(made: Path, slice_dir: str, tmp_path: Path) -> None:
    from vllm_ext.data.model_files import load_tokenizer

    ids = [load_tokenizer(slice_dir).encode(text, add_special_tokens=False).ids for text in ANSWERS]
    (tmp_path / "in.jsonl").write_text("\n".join(json.dumps({"name": row}) for row in ids[:3]))
    longest = max(map(len, ids))
    np.save(tmp_path / "in.npy", np.array([[*row, *[-1] * (longest - len(row))] for row in ids[3:]]))
    out = tmp_path / "out.trie"
    inputs = tmp_path / "in.jsonl", tmp_path / "in.npy"
    built = run("trie", "build", "--tokenizer", slice_dir, "--output", out, "--field", "name", *inputs)
    assert built.exit_code == 0, built.output
    for left, right in zip(trie_file.open_trie(made)[0], trie_file.open_trie(out)[0], strict=True):
        assert left.tolist() == right.tolist()


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("in.jsonl", '{"name": "x"}', "in.jsonl:1: there is no field 'text'; its fields: name. Use --field"),
        ("in.jsonl", "[1]", "its fields: none, it is no object"),
        ("in.jsonl", '\n{"text"', "in.jsonl:2: no JSON"),
        ("in.jsonl", "[" * 100_000, "in.jsonl:1: no JSON"),
        ("in.jsonl", '{"text": 3}', "field 'text' holds 3; a string or a list of token ids is needed"),
        ("in.jsonl", '{"text": [1, 4096]}', "4096 is no token id; allowed: 0 to 4095"),
        ("in.jsonl", '{"text": [1, true]}', "True is no token id"),
        ("in.txt", "\n\n", "the inputs hold no answer"),
        ("in.npy", "words", "in.npy: no .npy file of numbers"),
    ],
)
def test_inputs_that_cannot_be_read(
    slice_dir: str, tmp_path: Path, name: str, content: str, says: str
) -> None:
    (tmp_path / name).write_text(content)
    out = tmp_path / "out.trie"
    done = run("trie", "build", "--tokenizer", slice_dir, "--output", out, tmp_path / name)
    assert done.exit_code == 2
    assert says in done.output.replace("\n", ""), done.output
    assert not out.exists()


@pytest.mark.parametrize(
    ("array", "says"),
    [
        (np.zeros(3, np.int32), "holds int32 [3]; integers [num_sequences, longest] are needed"),
        (np.array([[1, -1, 2]]), "row 0 goes on behind its end"),
        (np.array([[1, 2], [3, 4096]]), "row 1 holds 4096, no token id"),
    ],
)
def test_arrays_that_cannot_be_read(slice_dir: str, tmp_path: Path, array: np.ndarray, says: str) -> None:
    np.save(tmp_path / "in.npy", array)
    done = run("trie", "build", "--tokenizer", slice_dir, "--output", tmp_path / "out", tmp_path / "in.npy")
    assert done.exit_code == 2
    assert says in done.output.replace("\n", ""), done.output


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (3, r'additional_config\["vllm_ext"\]=3 is not allowed; allowed: an object with some of \'rules\''),
        ([], r'additional_config\["vllm_ext"\]=\[\] is not allowed; allowed: an object'),
        (None, r'additional_config\["vllm_ext"\]=None is not allowed; allowed: an object'),
        ({"kv": None}, r'\["vllm_ext"\]\["kv"\]=None is not allowed; allowed: an object with a method'),
        ({"structured_outputs": None}, r"None is not allowed; allowed: an object"),
        (
            {"rule": {}},
            r"unknown key 'rule'. Did you mean 'rules'\? Known: 'rules', 'kv', 'structured_outputs'",
        ),
        ({"speculation": {}}, r"unknown key 'speculation'. Known: 'rules', 'kv', 'structured_outputs'"),
        ({"rules": {}}, r'\["rules"\]=\{\} is not allowed; allowed: an object of rules: trie'),
        ({"rules": {"tri": {}}}, r"unknown rule 'tri'\. Did you mean 'trie'\? Rules: trie"),
        (
            {"rules": {"trie": {}}},
            r"rule 'trie': files is missing, and required: the sets that requests can name",
        ),
        ({"rules": {"trie": {"files": {"a": 3}}}}, r"files.a=3 is not allowed; allowed: object, at least 1"),
        (
            {"rules": {"trie": {"files": {"a": "~nouser/x"}}}},
            r"files=.*'a': Could not determine home directory; write",
        ),
        ({"rules": {"trie": []}}, r"rule 'trie': \[\] is not allowed; allowed: an object"),
        (
            {"rules": {"asap": {"memory_mb": 10**20}}},
            r"memory_mb=1000.* is not allowed; allowed: integer, 1 to",
        ),
        ({"rules": {"asap": {"state_dir": "~nouser/x"}}}, r"state_dir='~nouser/x': Could not determine home"),
        ({"rules": {"caad": {"file": "a\0b"}}}, r"file='a.*b': it has a NUL character"),
        (
            {"rules": {"momentum": {"resistance": [0.0, float("nan")]}}},
            r"resistance.1=nan is not allowed; allowed: array",
        ),
        (
            {"rules": {"trie": {"files": {"a": "x"}, "b": 1}}},
            r"unknown option b=1.*`vllm-ext rules NAME` explains",
        ),
        (
            {"rules": {"trie": {"files": {"a": "/no"}}}},
            r"rule 'trie': files.a='/no' cannot be read \(No such file",
        ),
    ],
)
@pytest.mark.parametrize("method", [None, {"method": "token_recycling"}])
def test_wrong_rules_end_start_up(slice_dir: str, method: Any, given: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        engine_config(slice_dir, given, speculative_config=method)


def test_what_rules_do_not_work_with(slice_dir: str, made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"rules": {"trie": {"files": {"short": str(made)}}}}
    with pytest.raises(ValueError, match=r"speculative_config.method='ngram'.*Use one of vllm-ext's"):
        engine_config(slice_dir, given, speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    monkeypatch.setattr(runners, "_has_triton", lambda: True)  # as on CUDA, where V2 is vLLM's default
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    with pytest.raises(
        ValueError,
        match=r"'adadec' do not work.*'adadec' puts tokens off.*set VLLM_USE_V2_MODEL_RUNNER=0",
    ):
        engine_config(slice_dir, {"rules": {"adadec": {}, **given["rules"]}})


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        ("asap", {"worker_cls": "my.Worker"}),
        ("awrs", {"worker_cls": "my.Worker"}),
        ("awrs", {"scheduler_cls": "my.Scheduler"}),
        ("awrs", {"async_scheduling": True}),
    ],
)
def test_classes_of_the_users_own_next_to_rules_that_bring_theirs(
    slice_dir: str, rule: str, options: dict[str, Any]
) -> None:
    (name,) = options
    with pytest.raises(
        ValueError, match=rf"sampling rules '{rule}' do not work with {name}=.*Remove that option"
    ):
        engine_config(slice_dir, {"rules": {rule: {}}}, **options)


def test_rules_that_report_or_learn_bring_their_classes(slice_dir: str, made: Path, tmp_path: Path) -> None:
    config = engine_config(slice_dir, {"rules": {"awrs": {}}})
    assert config.parallel_config.worker_cls == worker.path_of(["Rules"])
    reports = ["RuleReports", "FaultyRequests", "DeferredTokens"]
    assert config.scheduler_config.scheduler_cls == scheduler.path_of(reports, ahead=False)
    config = engine_config(
        slice_dir, {"rules": {"awrs": {}}}, speculative_config={"method": "token_recycling"}
    )
    assert config.parallel_config.worker_cls == worker.path_of(["Speculation", "Rules", "Counts"])
    asap = {"asap": {"state_dir": str(tmp_path / "new")}}
    config = engine_config(slice_dir, {"rules": asap})
    assert config.parallel_config.worker_cls == worker.path_of(["Rules", "Counts"])
    waits = ["FaultyRequests", "DeferredTokens", "Counts"]  # grammars compile beside it
    assert config.scheduler_config.scheduler_cls == scheduler.path_of(waits, ahead=False)
    assert (tmp_path / "new").is_dir()
    config = engine_config(slice_dir, {"rules": {"trie": {"files": {"short": str(made)}}}})
    assert config.parallel_config.worker_cls == worker.path_of(["Rules"])  # it tells of rules that fail
    ahead = config.scheduler_config.async_scheduling
    assert config.scheduler_config.scheduler_cls == scheduler.path_of(["FaultyRequests"], ahead)


def test_a_folder_that_cannot_be_written_to_is_refused(slice_dir: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        ValueError, match=r"state_dir=.*nothing can be written there.*from --additional-config"
    ):
        engine_config(slice_dir, {"rules": {"asap": {"state_dir": str(tmp_path / "file" / "x")}}})


@pytest.mark.parametrize("method", [None, {"method": "token_recycling"}])
def test_requests_are_looked_at_where_they_come_in(slice_dir: str, made: Path, method: Any) -> None:
    given = {"rules": {"trie": {"files": {"short": str(made)}}}}
    config = engine_config(slice_dir, given, speculative_config=method)
    processors = config.model_config.logits_processors

    def refused(extra_args: dict[str, Any], **options: Any) -> str:
        with pytest.raises(VLLMValidationError) as error:
            validate_logits_processors_parameters(
                processors, SamplingParams(extra_args=extra_args, **options)
            )
        return str(error.value)

    assert "vllm_xargs: trie='long' is not allowed; allowed: 'short'." in refused({"trie": "long"})
    assert "vllm_xargs: trie=3 is not allowed; allowed: string. Of rule trie: trie: string." in refused(
        {"trie": 3}
    )
    assert "does not go with ignore_eos=True" in refused({"trie": "short"}, ignore_eos=True)
    structured = StructuredOutputsParams(choice=["a"])
    assert "structured_outputs" in refused({"trie": "short"}, structured_outputs=structured)
    for fine in ({"trie": "short"}, {"session_id": "4"}, None):
        validate_logits_processors_parameters(processors, SamplingParams(extra_args=fine))


def test_rules_that_contradict_each_other(slice_dir: str, made: Path) -> None:
    settings = rules.parse(
        {"rpg": {}, "trie": {"files": {"short": str(made)}}, "extract": {"max_passage": 9}}
    )
    assert list(settings.options) == ["trie", "extract", "rpg"]
    settings.validate(SamplingParams(extra_args={"extract": "a passage", "rpg": 1, "rpg_count": 3}))
    for asking, says in (
        ({"extract": "passage", "trie": "short"}, "vllm_xargs: trie and extract do not go together"),
        ({"extract": "a passage of more"}, "extract has 17 characters; allowed: 9, which is"),
        ({"extract": ""}, "extract='' is not allowed; allowed: string"),
        (
            {"extract": "a", "extract_max_tokens": 0},
            "extract_max_tokens=0 is not allowed; allowed: integer, 1 to",
        ),
        ({"rpg": 0}, "rpg=0 is not allowed"),
        ({"rpg": float("inf")}, "rpg=inf is not allowed"),
        ({"rpg_count": 2}, "rpg is missing, and required"),
        ({"rpg": 1, "rpg_count": 1}, "rpg_count=1 is not allowed; allowed: integer, 2 to"),
    ):
        with pytest.raises(ValueError, match=re.escape(says)):
            settings.validate(SamplingParams(extra_args=asking))


def test_spans_of_a_tokenizer(slice_dir: str) -> None:
    """Each is a part of the text; what stands behind a space may begin an answer."""
    vocabulary = ModelVocabulary(slice_dir, None, "auto", False, 4096)
    text = 'The old sea and the "new" one: caf\u00e9, 12 o\'clock.\n\tNo more'
    passage = Passages(vocabulary).of(text, end=2)
    constraint = SpanConstraint(passage, 99, [], 2)
    firsts = {vocabulary.pieces[token] for token in constraint.allowed()}
    assert {b"The", b" old", b"old", b" sea", b"se", b"1", b'"'} <= firsts  # "sea" is no token of its own
    assert all(piece in text.encode() for piece in firsts)
    for part in ("The old sea and the", "sea and the", "the", text):
        assert SpanConstraint(passage, 99, vocabulary.encode(part), 2).accept(2), part
    for other in ("The sea", "and the old", "now"):
        assert not SpanConstraint(passage, 99, vocabulary.encode(other), 2).accept(2), other


def test_texts_have_limits_and_refused_ones_are_not_kept() -> None:
    settings = rules.parse(
        {
            "extract": {},
            "asap": {},
            "awrs": {"max_text": 40},
            "monitor": {},
            "cad": {},
            "trie": {"files": {"a": "/x"}},
        }
    )
    longest = {"extract": 100_000, "awrs_json": 40, "awrs_check": 40}
    texts = ["extract", "asap_json", "asap_regex", "asap_grammar", "awrs_json", "awrs_check", "monitor"]
    tracemalloc.start()
    try:
        for number, key in enumerate([*texts, "monitor_context", "cad_context", "cad_negative", "trie"] * 20):
            most = longest.get(key, 65_536)
            given = SamplingParams(extra_args={key: f"{number} " + "x" * 1_000_000})
            with pytest.raises(
                ValueError, match=rf"{key} has 100\d+ characters; allowed: {most}, which"
            ) as error:
                settings.validate(given)
            assert len(str(error.value)) < 300
            del error, given
        # What is wrong in another way is not kept either.
        for number in range(100):
            with pytest.raises(ValueError, match="is not allowed") as error:
                settings.validate(SamplingParams(extra_args={"trie": f"{number} " + "x" * 60_000}))
            assert len(str(error.value)) < 600
            del error
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert used < 3_000_000


def test_a_rule_that_is_not_there_is_named(made: Path) -> None:
    settings = rules.parse({"trie": {"files": {"short": str(made)}}})
    nothing = rules.RuleSettings({})
    asking = SamplingParams(extra_args={"trie": "short"})
    with pytest.raises(
        ValueError, match=r"vllm_xargs trie: this server has no rule 'trie'; start it with --addit"
    ):
        nothing.validate(asking)
    (found,) = settings.of_request(asking)
    assert found.name == "trie"
    # The name carries them to any process.
    module, _, name = logits_processor.configured.name_of(settings).partition(":")
    assert module == logits_processor.__name__
    assert getattr(logits_processor.configured, name.split(".")[1]).settings == settings
