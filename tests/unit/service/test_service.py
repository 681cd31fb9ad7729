"""The log of a process: what it says in JSON, and what in text."""

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.fixtures.vocabularies import tokenizer_of
from vcpo.service.lifecycle import (
    Ready,
    StartError,
    split_address,
    start_errors,
)
from vcpo.service.logs import JsonLine
from vcpo.service.model_config import (
    config_problem,
    is_known_family,
)
from vcpo.service.run_lock import LockHolder, RunLockedError, run_lock
from vcpo.service.vocabulary import (
    Vocabulary,
    keep_vocabulary,
    num_tokens,
    vocabulary_of,
)

SIZES = {
    "vocab_size": 12,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
}


class Lossy:
    """Two tokens look alike, so that the map from tokens to ids has one of them."""

    all_special_ids = (0,)

    def get_vocab(self):
        return {"<s>": 0, "a": 1, "?": 3}

    def convert_ids_to_tokens(self, ids):
        return ("<s>", "a", "?", "?")[ids]


def test_the_largest_id_ends_the_vocabulary_and_ids_between_are_holes():
    found = Vocabulary.of(tokenizer_of([0, 1, 4, 6]), num_rows=12)
    assert found == Vocabulary(num_tokens=7, holes=(2, 3, 5))


def test_tokens_added_to_a_tokenizer_are_tokens():
    tokenizer = tokenizer_of([0, 1, 2])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool>"]})
    tokenizer.add_tokens(["new"])
    assert Vocabulary.of(tokenizer, num_rows=12) == Vocabulary(num_tokens=5)


def test_a_token_that_looks_like_another_is_no_hole():
    assert Vocabulary.of(Lossy(), num_rows=12) == Vocabulary(num_tokens=4)


def test_a_tokenizer_of_no_files_is_refused():
    # As transformers makes one for a folder that has none: with its special tokens only.
    empty = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.BPE(vocab={"<end>": 0}, merges=[])), eos_token="<end>"
    )
    with pytest.raises(ValueError, match="no token for text; its files are missing"):
        Vocabulary.of(empty, num_rows=12)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_model_carries_its_vocabulary_and_without_one_every_row_is_a_token(tied):
    model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied))
    assert vocabulary_of(model) is None
    assert num_tokens(model) == 12
    keep_vocabulary(model, tokenizer_of([0, 1, 3]))
    assert vocabulary_of(model) == Vocabulary(num_tokens=4, holes=(2,))
    assert num_tokens(model) == 4
    assert "vcpo" not in model.config.to_json_string()


HOLD = """
import sys
from pathlib import Path
from vcpo.service.run_lock import LockHolder, run_lock
with run_lock(Path(sys.argv[1]), LockHolder.LEARNER):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the learner's lock."""
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


class Clock:
    """A clock that only sleeping moves."""

    def __init__(self):
        self.now_s = 0.0
        self.on_sleep = lambda: None

    def __call__(self):
        return self.now_s

    def sleep(self, duration_s):
        self.now_s += duration_s
        self.on_sleep()


def test_a_second_learner_is_reported_who_trains_where_since_when_and_what_to_do(holder, tmp_path):
    with pytest.raises(RunLockedError) as refused, run_lock(tmp_path, LockHolder.LEARNER):
        pass
    assert re.fullmatch(
        re.escape(
            f"{tmp_path}: another learner (process {holder.pid} on {socket.gethostname()}, since "
        )
        + r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC\) works on this run; wait until it ends, "
        + rf"stop it \(kill {holder.pid}\), or give another directory",
        str(refused.value),
    )


def test_a_host_and_a_learner_do_not_exclude_each_other(holder, tmp_path):
    with run_lock(tmp_path, LockHolder.HOST):
        assert holder.poll() is None


def test_the_lock_of_a_killed_process_is_taken_over(holder, tmp_path):
    holder.kill()
    holder.wait()
    assert str(holder.pid) in (tmp_path / "learner.lock").read_text()
    with run_lock(tmp_path, LockHolder.LEARNER):
        assert f'"pid": {os.getpid()},' in (tmp_path / "learner.lock").read_text()


def test_one_who_is_patient_gets_the_lock_of_a_process_that_ends(holder, tmp_path):
    clock = Clock()

    def end():
        holder.kill()
        holder.wait()

    clock.on_sleep = end
    with run_lock(tmp_path, LockHolder.LEARNER, patience_s=9, clock=clock, sleep=clock.sleep):
        assert clock.now_s > 0


def test_a_holder_that_has_not_signed_yet_is_still_a_holder(holder, tmp_path):
    (tmp_path / "learner.lock").write_text("")
    expected = "another learner works on this run; wait until it ends, stop that process"
    with pytest.raises(RunLockedError, match=expected), run_lock(tmp_path, LockHolder.LEARNER):
        pass


LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
CUSTOM = {
    "model_type": "house_model",
    "architectures": ["HouseForCausalLM"],
    "auto_map": {"AutoConfig": "house.Config", "AutoModelForCausalLM": "house.Model"},
}
IMAGES = {"vision_config": {"depth": 1}, "text_config": {"hidden_size": 8}}


def problem_of(config, *, is_known=True, trust_remote_code=False):
    found = config_problem(config, "m", is_known=is_known, trust_remote_code=trust_remote_code)
    return None if found is None else str(found)


def quantized(**settings):
    return {**LLAMA, "quantization_config": settings}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (quantized(quant_method="gptq", bits=4), r"\(gptq\).*give the checkpoint that it was made"),
        (quantized(quant_method="awq", bits=4), r"\(awq\).*give the checkpoint that it was made"),
        (quantized(load_in_4bit=True), r"\(bitsandbytes\).*from_pretrained\(name\)\.dequantize"),
        (quantized(quant_method="fp8"), r"\(fp8\).*FineGrainedFP8Config\(dequantize=True\)"),
        (quantized(quant_method="mxfp4"), r"\(mxfp4\).*Mxfp4Config\(dequantize=True\)"),
        (quantized(quant_algo="NVFP4"), r"\(NVFP4\)"),
        (
            {**LLAMA, "compression_config": {"quant_method": "compressed-tensors"}},
            r"\(compressed-tensors\).*CompressedTensorsConfig\(dequantize=True\)",
        ),
        ({"model_type": "gemma3", "text_config": quantized(quant_method="gptq")}, r"\(gptq\)"),
        (
            {"model_type": "mistral3", **IMAGES},
            r"a model of images, video or sound \(mistral3\).*give a text-only checkpoint",
        ),
        (
            {"model_type": "t5", "is_encoder_decoder": True},
            r"an encoder-decoder model \(t5\); give one with a decoder alone",
        ),
        (
            {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
            r"is a BertForMaskedLM, .*give a causal language model",
        ),
        (
            {**LLAMA, "architectures": ["LlamaForSequenceClassification"]},
            r"is a LlamaForSequenceClassification, .*give a causal language model",
        ),
    ],
)
def test_each_kind_that_cannot_be_trained_is_named_with_its_own_cure(config, said):
    problem = problem_of(config)
    assert problem.startswith("spec.model.name: is a")
    assert problem.endswith("(got 'm')")
    assert re.search(said, problem), problem


@pytest.mark.parametrize(
    "config",
    [
        LLAMA,
        {**LLAMA, "quantization_config": None},
        {"model_type": "llama"},  # nothing is known of it
        {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
        {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"], **IMAGES},
        {"model_type": "qwen3_5", "architectures": ["Qwen3_5ForConditionalGeneration"], **IMAGES},
        # A known family needs no code of its repository, though it has some.
        {**LLAMA, "auto_map": CUSTOM["auto_map"]},
    ],
)
def test_a_causal_model_is_no_problem(config):
    assert problem_of(config) is None


def test_code_of_a_repository_needs_the_users_word():
    problem = problem_of(CUSTOM, is_known=False)
    assert problem.startswith("spec.model.trustRemoteCode: 'm' needs the Python code of its own")
    assert problem_of(CUSTOM, is_known=False, trust_remote_code=True) is None


def test_every_causal_family_of_the_library_is_known_and_none_is_refused_by_its_class():
    for family, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        config = {"model_type": family, "architectures": [name] if isinstance(name, str) else name}
        assert is_known_family(config), family
        assert problem_of(config) is None, family
    assert not is_known_family({"model_type": "house_model"})


READY = Ready(pid=12, grpc_port=7600, metrics_port=7601)
TIMEOUT_S = 60
SERVICE = """
import asyncio, sys
from vcpo.service.lifecycle import on_parent_exit, on_stop_request

async def serve():
    stopped = asyncio.get_running_loop().create_future()
    on_stop_request(stopped.set_result)
    on_parent_exit(stopped.set_result)
    print("serving", flush=True)
    print(await stopped, flush=True)

asyncio.run(serve())
"""


@pytest.mark.parametrize("problem", [OSError("port taken"), ValueError("no port")])
def test_what_the_user_must_put_right_while_starting_is_a_start_error(problem):
    with pytest.raises(StartError, match=str(problem)), start_errors():
        raise problem


FAULTS = """
from resource import RUSAGE_SELF, getrusage
from vcpo.service.lifecycle import keep_freed_memory

keep_freed_memory()
for _ in range(2):
    before = getrusage(RUSAGE_SELF).ru_minflt
    bytearray(2**28)
    print(getrusage(RUSAGE_SELF).ru_minflt - before)
"""


def test_memory_that_was_freed_is_taken_again_without_the_system():
    command = [sys.executable, "-c", FAULTS]
    first, second = map(int, subprocess.check_output(command, text=True).split())
    assert first >= 128 > 10 * second  # pages of at most 2 MiB


@pytest.fixture
def service() -> Iterator[subprocess.Popen[str]]:
    """A process that serves until it is told, in one of the two ways, to stop."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", SERVICE], text=True, **pipes) as process:
        assert process.stdout.readline() == "serving\n"
        yield process
        process.kill()


def last_words(service: subprocess.Popen[str]) -> str:
    """What a service that was told to stop says, while its standard input stays open."""
    service.wait(TIMEOUT_S)
    return service.stdout.read()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_asks_a_service_to_stop(service, number):
    service.send_signal(number)
    assert last_words(service) == f"{number.name}\n"


def test_the_end_of_its_parent_stops_a_service(service):
    said, _ = service.communicate(timeout=TIMEOUT_S)  # closes the service's standard input
    assert (said, service.returncode) == ("the host process has ended\n", 0)


UNSHARE = ["unshare", "--pid", "--fork", *(["--map-root-user"] if os.getuid() else [])]
SIGNALS_ITSELF = "import os, signal, sys; os.kill(os.getpid(), signal.SIGTERM); sys.exit('alive')"


@pytest.mark.parametrize("is_first", [False, True], ids=["a process", "the first process"])
@pytest.mark.parametrize(
    ("service", "imported"),
    [
        ("vcpo_learner", "transformers"),
        ("vcpo_rollout", "grpc"),
        ("vcpo.service.process torch.distributed.run", "torch"),
    ],
)
def test_a_service_that_is_ended_while_it_imports_is_gone(tmp_path, service, imported, is_first):
    if is_first and subprocess.run([*UNSHARE, "true"], check=False).returncode:
        pytest.skip("no process here may make a namespace of process ids")
    (tmp_path / f"{imported}.py").write_text(SIGNALS_ITSELF)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    command = [*(UNSHARE if is_first else []), sys.executable, "-m", *service.split()]
    ended = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, check=False
    )
    assert (ended.returncode, ended.stderr) == (143, b"")


KEPT = """
import atexit, sys, threading
from types import SimpleNamespace
from vcpo.service.process import run_service
threading.Thread(target=threading.Event().wait).start()
atexit.register(threading.Event().wait)
print("last words", end="")
sys.modules["command"] = SimpleNamespace(main={main})
run_service("command")
"""


@pytest.mark.parametrize(
    ("main", "status", "told"),
    [
        ("lambda: 69", 69, ""),
        ("lambda: exit(2)", 2, ""),
        ("lambda: exit()", 0, ""),
        ("lambda: None", 0, ""),
        ("lambda: {}[7]", 1, "KeyError: 7"),
    ],
)
def test_nothing_keeps_a_service_that_has_ended(main, status, told):
    command = [sys.executable, "-c", KEPT.format(main=main)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert (ended.returncode, ended.stdout) == (status, "last words")
    assert ended.stderr.strip().endswith(told)


def test_a_service_whose_output_nobody_reads_any_more_ends_too():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-c", KEPT.format(main="lambda: 69")]
    own = {**os.environ, "PYTHONUNBUFFERED": ""}  # its words wait for the end
    ended = subprocess.run(command, stdout=writer, env=own, check=False, timeout=TIMEOUT_S)
    os.close(writer)
    assert ended.returncode == 69


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        ("learner.ns.svc:7600", ("learner.ns.svc", 7600)),
        ("[::1]:65535", ("[::1]", 65535)),
    ],
)
def test_an_address_is_split_at_its_last_colon(address, parts):
    assert split_address(address) == parts


@pytest.mark.parametrize("address", ["", "7600", ":7600", "host", "host:", "host:x", "host:65536"])
def test_what_is_no_address_is_refused_with_its_value(address):
    with pytest.raises(ValueError, match=f"address: must be host:port, got '{address}'"):
        split_address(address)


REQUIRED = {"time", "level", "part", "logger", "message", "run", "namespace", "pod"}


def said(code, **environment):
    """Return the standard error of a process that configures its log and runs code."""
    start = "from vcpo.service import logs; import logging; logs.configure('learner')\n"
    process = subprocess.run(
        [sys.executable, "-c", start + code],
        env={**os.environ, "POD_NAME": "demo-learner-0", "POD_NAMESPACE": "ml", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.stdout == ""
    return process.stderr


def lines(code):
    found = [json.loads(line) for line in said(code, VCPO_LOG_FORMAT="json").splitlines()]
    assert all(line.keys() >= REQUIRED for line in found)
    return found


def only(code):
    (line,) = lines(code)
    return line


def test_every_line_names_part_pod_namespace_and_once_it_is_known_the_run():
    before, after = lines(
        "logging.warning('a'); logs.identify_process(run='demo', worker='w'); logging.info('b')"
    )
    assert (before["part"], before["pod"], before["namespace"]) == (
        "learner",
        "demo-learner-0",
        "ml",
    )
    assert (before["run"], after["run"], after["worker"]) == ("", "demo", "w")


def test_fields_of_a_context_are_on_the_lines_of_its_tasks_and_threads():
    first, second = lines(
        "import asyncio\n"
        "async def work(): await asyncio.to_thread(logging.info, 'in a thread')\n"
        "async def main():\n"
        "    with logs.log_fields(lease='l-1'):\n"
        "        task = asyncio.create_task(work())\n"
        "    await task\n"
        "    logging.info('outside')\n"
        "asyncio.run(main())"
    )
    assert (first["lease"], "lease" in second) == ("l-1", False)


def test_what_code_prints_is_one_line_for_each_piece():
    first, second, third = lines(
        "import sys\nprint('a', 'b'); sys.stderr.write('two\\nlines\\n'); print('no end', end='')"
    )
    assert (first["message"], first["logger"], first["level"]) == ("a b", "stdout", "INFO")
    assert (second["message"], second["logger"]) == ("two\nlines", "stderr")
    assert (second["level"], third["message"]) == ("WARNING", "no end")


def test_of_a_progress_bar_the_last_state_is_logged():
    line = only("import sys; sys.stderr.write('\\r 1/2'); sys.stderr.write('\\r 2/2\\n')")
    assert line["message"] == " 2/2"


@pytest.mark.parametrize(
    ("code", "level"),
    [
        ("raise ValueError('bad')", "CRITICAL"),
        ("import threading\ndef f(): raise ValueError('bad')\nthreading.Thread(target=f).start()",
         "ERROR"),
        ("class C:\n    def __del__(self): raise ValueError('bad')\nC()", "WARNING"),
    ],
    ids=["uncaught", "of a thread", "ignored"],
)  # fmt: skip
def test_an_exception_that_nobody_catches_is_one_line(code, level):
    line = only(code)
    assert line["level"] == level
    assert line["exc_info"].endswith("ValueError: bad")


def test_a_line_that_cannot_be_formatted_says_where_and_why():
    line = only("logging.info('%d', 'x')")
    assert (line["level"], line["exc_info"].splitlines()[-1]) == (
        "ERROR",
        "TypeError: %d format: a real number is required, not str",
    )
    assert "'%d'" in line["message"]


def test_a_process_that_the_service_starts_writes_lines_with_the_same_fields():
    child = (
        "import logging; from vcpo.service import logs;"
        "logging.getLogger().addHandler(logs.line_handler()); logging.warning('from a child')"
    )
    line = only(
        "logs.identify_process(run='demo')\n"
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    )
    assert (line["message"], line["part"], line["run"]) == ("from a child", "learner", "demo")


@pytest.mark.parametrize("form", ["json", "text"])
@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("raise ValueError('bad')", "ValueError: bad"),
        ("raise ExceptionGroup('two', [ExceptionGroup('g', [OSError('no')])])", "OSError: no"),
        ("logs.report_end('engine: it died'); raise ValueError('later')", "engine: it died"),
        ("logging.exception('a task failed')", ""),
    ],
)
def test_the_cause_of_an_end_is_kept_and_the_first_one_stays(tmp_path, form, code, cause):
    file = tmp_path / "end"
    said(code, VCPO_LOG_FORMAT=form, VCPO_TERMINATION_LOG=str(file))
    assert (file.read_text() if file.exists() else "") == cause


MOMENT_UNIX_S = 1_600_000_000.25  # 2020-09-13 12:26:40.250 UTC


def line_of(fields, *, extra=None, level=logging.INFO, message="step %d", args=(3,)):
    record = logging.makeLogRecord(
        {
            "name": "vcpo_learner.app",
            "levelno": level,
            "levelname": logging.getLevelName(level),
            "msg": message,
            "args": args,
            "created": MOMENT_UNIX_S,
            **(extra or {}),
        }
    )
    return JsonLine(lambda: fields).format(record)


def test_a_line_holds_time_level_logger_message_and_the_fields_of_its_process():
    assert json.loads(line_of({"part": "learner", "run": "demo"}, extra={"step": 3})) == {
        "time": "2020-09-13T12:26:40.250Z",
        "level": "INFO",
        "logger": "vcpo_learner.app",
        "message": "step 3",
        "step": 3,
        "part": "learner",
        "run": "demo",
    }


def test_a_line_of_kopf_names_the_run_of_its_object():
    about = {"k8s_ref": {"name": "demo", "namespace": "ml", "uid": "7"}, "settings": object()}
    line = json.loads(line_of({"part": "operator", "run": ""}, extra=about))
    assert (line["namespace"], line["run"]) == ("ml", "demo")
    assert not {"k8s_ref", "settings"} & line.keys()
