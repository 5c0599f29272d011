"""Checkpoints on disk: whole or invisible, DCP can read them, nothing in them can act."""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import random
import select
import signal
import subprocess
import sys
import threading
import zlib
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import metadata

from resilient.core.model import Cut, CutKind, Holding
from resilient.errors import CheckpointCorrupt, CheckpointMissing
from resilient.page import Page
from resilient.state import disk, stored
from resilient.state.protect import Protected
from resilient.state.snapshot import SECTIONS, Image
from tests.state.rank_checks import _bits, _odd_tensors

ROOT = Path(__file__).parent.parent.parent


def make_image(step: int, **tensors) -> Image:
    tensors = tensors or {"model.weight": torch.full((300, 40), float(step))}
    return Image(step, {"cursor": {"consumed": step, "pair": [1, 2, 3]}}, parameters=tensors)


def save(directory, step, world_size=1, image=None):
    for rank in range(world_size):
        disk.write_rng(directory, step, rank, b"generators %d" % rank)
    disk.save(directory, image or make_image(step), world_size)
    return stored.step_dir(directory, step)


@pytest.fixture(autouse=True)
def forget_scans():
    stored._damaged.clear()
    yield
    stored._damaged.clear()


def test_every_kind_of_tensor_comes_back(tmp_path):
    tensors = {key: t for key, t in _odd_tensors().items() if not t.is_conj()}
    image = make_image(7, **tensors)
    image.buffers["model.seen"] = torch.tensor(3)
    image.states["optimizer.state.0.step"] = torch.tensor(7.0)
    save(tmp_path, 7, 3, image)
    assert disk.newest_complete(tmp_path) == 7
    back, rng = disk.load(tmp_path, 7, 2)
    assert rng == b"generators 2" and back.step == 7 and back.tree == image.tree
    for section in SECTIONS:
        assert list(back.section(section)) == list(image.section(section))
        for key, tensor in image.section(section).items():
            got = back.section(section)[key]
            assert got.dtype == tensor.dtype and got.shape == tensor.shape, key
            assert _bits(got) == _bits(tensor), key
    assert disk.load(tmp_path, 7, 5)[1] is None, "a larger world: that rank has none"
    disk.prune(tmp_path, 2)
    assert os.listdir(tmp_path) == ["step-00000007"]


def test_dcp_itself_reads_it(tmp_path):
    path = save(tmp_path, 4)
    target = {"model.weight": torch.zeros(300, 40)}
    dcp.load(target, checkpoint_id=path, no_dist=True)
    assert torch.equal(target["model.weight"], torch.full((300, 40), 4.0))


def test_not_there(tmp_path):
    assert disk.newest_complete(tmp_path / "nowhere") is None
    assert disk.newest_complete(tmp_path) is None
    with pytest.raises(CheckpointMissing):
        disk.load(tmp_path, 3, 0)


# ---------------------------------------------------------------- damage


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "harm", "word"),
    [
        ("__0_0.distcp", _cut, "cut short"),
        ("__0_0.distcp", _flip, "damaged"),
        ("__0_0.distcp", Path.unlink, "No such file"),
        (".metadata", _cut, "cut short"),
        (".metadata", _flip, "damaged"),
        (".metadata", Path.unlink, "No such file"),
        ("manifest.json", _cut, "cannot be read"),
        ("manifest.json", Path.unlink, "no manifest.json"),
        ("rng-00001.bin", _flip, "damaged"),
    ],
)
def test_damage_is_found_and_the_older_one_used(tmp_path, name, harm, word):
    save(tmp_path, 10, 2)
    harm(save(tmp_path, 20, 2) / name)
    notes = []
    assert disk.newest_complete(tmp_path, notes.append) == 10
    assert len(notes) == 1 and "step-00000020" in notes[0] and word in notes[0]
    with pytest.raises(CheckpointCorrupt):
        disk.load(tmp_path, 20, 0)
    assert disk.newest_complete(tmp_path) == 10, "asked again, in a recovery"
    save(tmp_path, 20, 2)
    assert disk.newest_complete(tmp_path) == 20, "written anew"


def test_strangers_in_the_directory(tmp_path):
    save(tmp_path, 10)
    (tmp_path / "step-00000030").mkdir()
    (tmp_path / ".pending-step-00000040").mkdir()
    (tmp_path / "step-abc").mkdir()
    os.rename(save(tmp_path, 20), tmp_path / "step-00000050")
    assert [(f.step, bool(f.problem)) for f in stored.scan(tmp_path)] == [
        (50, True),
        (30, True),
        (10, False),
    ]
    assert disk.newest_complete(tmp_path) == 10


# ---------------------------------------------------------------- malice


class Evil:
    def __init__(self, call, *args):
        self.call, self.args = call, args

    def __reduce__(self):
        return self.call, self.args


def replace_metadata(path: Path, value) -> None:
    """As an attacker would: with the manifest made to match."""
    data = value if isinstance(value, bytes) else pickle.dumps(value)
    (path / ".metadata").write_bytes(data)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][".metadata"] = [len(data), zlib.crc32(data)]
    (path / "manifest.json").write_text(json.dumps(manifest))


def attacks(touched: Path):
    yield Evil(os.system, f"touch {touched}")
    yield Evil(open, str(touched), "w")
    yield Evil(eval, f"open({str(touched)!r}, 'w')")
    yield Evil(torch.load, io.BytesIO(pickle.dumps(Evil(open, str(touched), "w"))))
    yield b"cbuiltins\ngetattr\n(ctorch\nload\nS'__globals__'\ntR."
    yield metadata.Metadata({}, planner_data=Evil(open, str(touched), "w"), storage_data={})
    yield b"cresilient.state.disk\nos.system\n(S'touch " + str(touched).encode() + b"'\ntR."
    yield b"ctorch\nserialization.os.system\n(S'touch " + str(touched).encode() + b"'\ntR."
    yield b"\x80\x04\x95"
    yield b""
    yield {"no": "metadata"}


@pytest.mark.parametrize("index", range(11))
def test_a_malicious_pickle_is_refused_and_not_run(tmp_path, index):
    touched = tmp_path / "touched"
    save(tmp_path / "c", 10)
    path = save(tmp_path / "c", 20)
    replace_metadata(path, list(attacks(touched))[index])
    with pytest.raises(CheckpointCorrupt):
        disk.load(tmp_path / "c", 20, 0)
    with pytest.raises(CheckpointCorrupt):
        stored.read_metadata(path)
    assert disk.newest_complete(tmp_path / "c") == 10
    assert not touched.exists()


def test_the_attacks_would_work_on_plain_pickle(tmp_path):
    touched = tmp_path / "touched"
    pickle.loads(pickle.dumps(Evil(os.system, f"touch {touched}")))
    assert touched.exists()


def test_bytes_entries_and_other_files_are_refused(tmp_path):
    path = save(tmp_path, 20)
    good = stored.read_metadata(path)
    info = next(iter(good.storage_data.values()))
    index = metadata.MetadataIndex("x")
    for bad in (
        metadata.Metadata({"x": metadata.BytesStorageMetadata()}, storage_data={index: info}),
        metadata.Metadata({}, storage_data={index: type(info)("../../etc/passwd", 0, 9)}),
        metadata.Metadata({}, storage_data={index: type(info)("__0_0.distcp", 0, 9, ["zstd"])}),
        metadata.Metadata({}, storage_data=None),
    ):
        replace_metadata(path, bad)
        with pytest.raises(CheckpointCorrupt):
            stored.read_metadata(path)


# ---------------------------------------------------------------- kills


WRITER = """
import sys, torch
from resilient.state import disk
from resilient.state.snapshot import Image
torch.set_num_threads(1)
directory, start = sys.argv[1], int(sys.argv[2])
if start == 0:  # the zygote of the test: forks a writer for each line it is sent
    import os
    for line in sys.stdin:
        start = int(line)
        pid = os.fork()
        if pid == 0:
            break
        print(pid, flush=True)
        os.waitpid(pid, 0)
        print("gone", flush=True)
    else:
        sys.exit()
kept = disk.Checkpoints(directory, keep=2)
for step in range(start, start + 10_000):
    tensors = {f"model.{i}": torch.full((20_000,), float(step)) for i in range(5)}
    image = Image(step, {"cursor": {"consumed": step}}, parameters=tensors)
    for rank in range(3):
        disk.write_rng(directory, step, rank, b"%d of %d" % (rank, step))
    kept.finish(image, 3)
    os.write(1, b"wrote %d\\n" % step)
"""


def _line(stream, timeout_s: float = 60) -> str:
    ready, _, _ = select.select([stream], [], [], timeout_s)
    assert ready, f"the writer said nothing for {timeout_s} s"
    data = b""
    while not data.endswith(b"\n"):
        byte = os.read(stream.fileno(), 1)
        assert byte, "the writer is gone"
        data += byte
    return data.decode().strip()


def test_killed_at_any_time_one_is_always_whole(tmp_path):
    """50 writers, each killed at a random time: the newest ever announced, or newer, loads."""
    dice = random.Random(1)
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path), "0"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        bufsize=0,
    )
    announced, unfinished = 0, 0
    try:
        for kill in range(50):
            process.stdin.write(b"%d\n" % (announced + 1))
            pid = int(_line(process.stdout))
            for _ in range(1 + kill % 2):
                word, step = _line(process.stdout).split()
                assert word == "wrote"
                announced = int(step)
            delay = threading.Event()
            delay.wait(dice.uniform(0, 0.02))  # the random time of the kill
            os.kill(pid, signal.SIGKILL)
            while (line := _line(process.stdout)) != "gone":
                announced = int(line.split()[1])
            unfinished += any(name.startswith(".") for name in os.listdir(tmp_path))
            stored._damaged.clear()
            notes = []
            newest = disk.newest_complete(tmp_path, notes.append)
            assert newest in (announced, announced + 1), (newest, announced)
            assert notes == [], "what is visible is whole"
            image, rng = disk.load(tmp_path, newest, 2)
            assert rng == b"2 of %d" % newest
            assert all(bool((t == newest).all()) for t in image.parameters.values())
            announced = newest
            assert len([n for n in os.listdir(tmp_path) if n.startswith("step-")]) <= 3
    finally:
        process.stdin.close()
        process.wait(30)
        process.stdout.close()
    assert unfinished > 10, "the kills came between two checkpoints, not inside one"


# ---------------------------------------------------------------- in the background


def build():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def train(protected, objects, first, last, directory=None, every=0):
    for step in range(first, last + 1):
        objects["optimizer"].zero_grad()
        objects["model"](torch.randn(8, 4)).square().mean().backward()
        protected.tentative(step)
        objects["optimizer"].step()
        objects["scheduler"].step()
        protected.commit(step)
        if every and step % every == 0:
            protected.persist(step, str(directory))
    return objects


def bits(objects):
    tensors = [*objects["model"].parameters(), *objects["model"].buffers()]
    for state in objects["optimizer"].state_dict()["state"].values():
        tensors += state.values()
    return b"".join(map(_bits, tensors)) + repr(objects["scheduler"].state_dict()).encode()


def begin(protected, cut, rank=0, world_size=1):
    objects = build()
    protected.protect(objects, cut=cut, rank=rank, world_size=world_size)
    return objects


def test_saved_in_the_background_and_loaded(tmp_path):
    torch.manual_seed(4)
    protected = Protected()
    unbroken = train(protected, begin(protected, Cut(CutKind.INITIAL, 0)), 1, 9)

    torch.manual_seed(4)
    page = Page.create()
    protected = Protected(page)
    objects = begin(protected, Cut(CutKind.INITIAL, 0))
    train(protected, objects, 1, 4, tmp_path, every=4)
    train(protected, objects, 5, 6)  # goes on while it is written
    assert protected._checkpoints.wait_idle(60)
    assert page.read().persisted_step == 4 and disk.newest_complete(tmp_path) == 4
    page.close()

    torch.manual_seed(77)
    late = Protected(checkpoint_directory=str(tmp_path))
    again = train(late, begin(late, Cut(CutKind.DISK, 4)), 5, 9)
    assert bits(again) == bits(unbroken)


def test_only_the_newest_are_kept(tmp_path):
    protected = Protected()
    objects = begin(protected, Cut(CutKind.INITIAL, 0))
    for step in range(1, 6):
        train(protected, objects, step, step, tmp_path, every=1)
        assert protected._checkpoints.wait_idle(60)
    assert sorted(os.listdir(tmp_path)) == ["step-00000004", "step-00000005"]


def test_persist_when_asked(tmp_path):
    """One rank of three is told to write what it holds; the others left their generators."""
    ranks = [Protected(checkpoint_directory=str(tmp_path)) for _ in range(3)]
    for rank, protected in enumerate(ranks):
        # three ranks in one process: no group, so the same seed makes them replicas
        torch.manual_seed(1)
        objects = build()
        protected.protect(objects, cut=Cut(CutKind.INITIAL, 0), rank=0, world_size=1)
        protected._rank, protected._world_size = rank, 3
        train(protected, objects, 1, 3)
        torch.manual_seed(50 + rank)
        protected.commit(3)
        expected = bits(objects)
    for protected in ranks[:2]:
        assert protected.holdings()[0] == Holding(3, "live")
    notes = []
    ranks[1]._note = notes.append
    ranks[2].release()
    ranks[1].persist(3, str(tmp_path), wait=True)
    assert disk.newest_complete(tmp_path) == 3
    for rank in (0, 1):
        late = Protected(checkpoint_directory=str(tmp_path), note=notes.append)
        objects = begin(late, Cut(CutKind.DISK, 3), rank, 2)
        assert bits(objects) == expected
        assert torch.initial_seed() is not None
        assert late._generators.by_step[3] == ranks[rank]._generators.by_step[3]
    assert notes == []
    late = Protected(checkpoint_directory=str(tmp_path), note=notes.append)
    begin(late, Cut(CutKind.DISK, 3), 2, 3)
    assert len(notes) == 1 and "rank 2" in notes[0], "it left none: said, and seeded"
    with pytest.raises(CheckpointMissing):
        ranks[1].persist(9, str(tmp_path), wait=True)


def test_a_rank_that_never_comes(tmp_path):
    notes = []
    kept = disk.Checkpoints(tmp_path, note=notes.append)
    save(tmp_path, 5)
    kept.start(10, 0, 2, b"mine", make_image(10))
    kept.enter()  # the generation ended: rank 1 is dead
    assert kept.wait_idle(30)
    assert len(notes) == 1 and "rng-00001.bin" in notes[0] and "step 10" in notes[0]
    assert disk.newest_complete(tmp_path) == 5
    disk.write_rng(tmp_path, 15, 1, b"theirs")
    kept.start(15, 0, 2, b"mine", make_image(15))
    assert kept.wait_idle(30)
    assert disk.newest_complete(tmp_path) == 15
    assert sorted(os.listdir(tmp_path)) == ["step-00000005", "step-00000015"]


def test_storage_that_refuses(tmp_path):
    (tmp_path / "file").write_text("no directory")
    notes = []
    kept = disk.Checkpoints(tmp_path / "file", note=notes.append)
    kept.start(10, 0, 1, b"mine", make_image(10))
    assert kept.wait_idle(30)
    assert len(notes) == 1 and "was not written" in notes[0]


def test_a_full_disk_is_said_and_the_thread_lives_on(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    notes = []
    kept = disk.Checkpoints(tmp_path, note=notes.append)
    with monkeypatch.context() as patch:
        patch.setattr(disk._Writer, "write_data", refuse)
        kept.start(10, 0, 1, b"mine", make_image(10))
        assert kept.wait_idle(30)
    assert len(notes) == 1 and "step 10 was not written" in notes[0] and "No space" in notes[0]
    kept.start(20, 0, 1, b"mine", make_image(20))
    assert kept.wait_idle(30) and disk.newest_complete(tmp_path) == 20 and len(notes) == 1
    assert os.listdir(tmp_path) == ["step-00000020"]


def test_damaged_ones_do_not_count_as_kept(tmp_path):
    save(tmp_path, 10)
    for step in (80, 90):
        _flip(save(tmp_path, step) / "__0_0.distcp")
    assert disk.newest_complete(tmp_path) == 10
    kept = disk.Checkpoints(tmp_path, keep=2)
    for step in (20, 30):
        kept.start(step, 0, 1, b"mine", make_image(step))
        assert kept.wait_idle(30)
    complete = [found.step for found in stored.scan(tmp_path) if not found.problem]
    assert complete == [30, 20]
    assert disk.newest_complete(tmp_path) == 30


def test_a_rank_that_died_is_no_news_when_a_newer_one_is_there(tmp_path):
    notes = []
    kept = disk.Checkpoints(tmp_path, note=notes.append)
    kept.start(10, 0, 2, b"mine", make_image(10))  # rank 1 never comes
    save(tmp_path, 12, 2)  # by another rank, which was asked to
    kept.enter()
    assert kept.wait_idle(30)
    assert notes == [] and disk.newest_complete(tmp_path) == 12


def test_two_writers_of_one_step(tmp_path, monkeypatch):
    """The second publishes first; the first finds it, and its own goes."""
    disk.write_rng(tmp_path, 10, 0, b"mine")
    both = threading.Barrier(2)
    publish = disk._publish

    def together(pending, final):
        both.wait(30)
        publish(pending, final)

    monkeypatch.setattr(disk, "_publish", together)
    notes = []
    kept = disk.Checkpoints(tmp_path, note=notes.append)
    kept.start(10, 0, 1, b"mine", make_image(10))
    kept.finish(make_image(10), 1)
    assert kept.wait_idle(30)
    assert notes == [] and os.listdir(tmp_path) == ["step-00000010"]
    assert disk.newest_complete(tmp_path) == 10


def test_what_was_left_for_steps_that_are_done_anew_is_forgotten(tmp_path):
    for step in (3, 4, 5):
        for rank in (0, 1):
            disk.write_rng(tmp_path, step, rank, b"old")
    disk.forget_rng(tmp_path, 1, 4)
    left = sorted(os.listdir(tmp_path))
    assert [name for name in left if "00000005" in name] == [".rng-step-00000005-00000"]
    assert len(left) == 5


def test_the_last_one_is_finished_at_exit(tmp_path):
    code = (
        "import sys, torch\n"
        "from resilient.state import disk\n"
        "from resilient.state.snapshot import Image\n"
        "image = Image(6, {}, parameters={'w': torch.ones(3_000_000)})\n"
        "disk.Checkpoints(sys.argv[1]).start(6, 0, 1, b'mine', image)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, str(tmp_path)]
    subprocess.run(command, env=env, check=True, timeout=90)
    assert disk.newest_complete(tmp_path) == 6
