"""Why a trial failed, from its output."""

from stampede.engine.sweeps.failures import why

# As torchrun 2.13 ends two processes that cannot go on.
TORCHRUN = """\
W1121 09:12:01.123000 4711 torch/distributed/run.py:852] Setting OMP_NUM_THREADS
error: the loss is nan at step 2; lower the rates
E1121 09:12:09.123000 4711 torch/distributed/elastic/multiprocessing/api.py:984] failed
Root Cause (first observed failure):
[0]:
  time      : 2026-11-21_09:12:09
  rank      : 0 (local_rank: 0)
  exitcode  : 1 (pid: 4720)
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
"""


def test_the_sentence_is_the_runs_not_torchruns():
    assert why(TORCHRUN.encode(), 1) == "the loss is nan at step 2; lower the rates"
    other = TORCHRUN.replace("error: the", "error on rank 1: the")
    assert why(other.encode(), 1) == "the loss is nan at step 2; lower the rates"


def test_a_list_goes_with_its_sentence():
    said = b"error: job.yaml:\n  train.epochs: found 0\n  train.seed: unknown key\n  a: b\nmore\n"
    assert why(said, 2) == "job.yaml: train.epochs: found 0 train.seed: unknown key a: b"


def test_the_text_of_a_failure_is_whole():
    sentence = "the loss is nan " + "and so on " * 100 + "end"
    assert why(f"error: {sentence}\n".encode(), 1) == sentence
    assert why(f"{sentence}\n".encode(), 1) == f"exit status 1: {sentence}"


def test_without_a_sentence_the_last_words_count():
    assert why(b"a\nKeyError: 'x'\n", 1) == "exit status 1: KeyError: 'x'"
    assert why(b"", -9) == "killed by signal 9"
