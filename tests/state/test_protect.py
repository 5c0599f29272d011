"""One process: what it holds, when, and that it comes back bit by bit in new or old objects."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from resilient.core.model import Cut, CutKind, Holding
from resilient.errors import CheckpointMissing, ConfigError
from resilient.page import Page
from resilient.state.objects import Inventory
from resilient.state.protect import STEPS_WITH_UNDO, Protected


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.hidden = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(8, 6, bias=False)
        self.head.weight = self.embedding.weight  # tied
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.register_buffer("mask", torch.ones(400, 400), persistent=False)

    def forward(self, x):
        return self.head(self.dropout(self.hidden(self.norm(self.embedding(x)))))


class Cursor:
    def __init__(self):
        self.consumed = 0

    def state_dict(self):
        return {"consumed": self.consumed}

    def load_state_dict(self, state):
        self.consumed = state["consumed"]


class Run:
    """A training of one rank; `objects` are made anew by `build`, as a train function does."""

    def __init__(self, protected, build, cut=None, model=None, predecessor=None):
        self.protected = protected
        self.objects = build() if model is None else build(model)
        self.step = protected.protect(
            self.objects,
            cut=cut or Cut(CutKind.INITIAL, 0),
            rank=0,
            world_size=1,
            predecessor=predecessor,
        )
        self.model = self.objects["model"]
        self.optimizer = self.objects["optimizer"]

    def backward(self):
        x = torch.randint(0, 6, (8,))
        loss = F.cross_entropy(self.model(x), x)
        loss.backward()
        return loss

    def half_step(self):
        """Up to, but without, the commit."""
        self.optimizer.zero_grad()
        loss = self.backward()
        self.protected.tentative(self.step + 1)
        self.optimizer.step()
        for name, value in self.objects.items():
            if name.startswith("scheduler"):
                if isinstance(value, ReduceLROnPlateau):
                    value.step(loss.item())
                else:
                    value.step()
            if name == "ema":
                value.update_parameters(self.model)
        if "cursor" in self.objects:
            self.objects["cursor"].consumed += 1

    def train(self, num_steps=1):
        for _ in range(num_steps):
            self.half_step()
            assert self.protected.stepped
            self.step += 1
            self.protected.commit(self.step)
        return self


def state_of(objects):
    """All of it, copied, by plain torch means."""
    return copy.deepcopy(
        {
            name: (
                {**dict(value.named_parameters()), **dict(value.named_buffers())}
                if isinstance(value, nn.Module)
                else value.state_dict()
            )
            for name, value in objects.items()
        }
    )


def assert_same(a, b, path="state"):
    assert type(a) is type(b) or isinstance(a, torch.Tensor), f"{path}: {type(a)}, {type(b)}"
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape and a.device == b.device, path
        assert torch.equal(a, b), f"{path} differs"
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            assert_same(a[key], b[key], f"{path}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), path
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{path}.{index}")
    else:
        assert a == b, f"{path}: {a!r}, {b!r}"


def full_build(make_optimizer, make_scheduler=None):
    def build(model=None):
        model = model if model is not None else Net()
        optimizer = make_optimizer(model)
        objects = {"model": model, "optimizer": optimizer, "cursor": Cursor()}
        if make_scheduler is not None:
            objects["scheduler"] = make_scheduler(optimizer)
        return objects

    return build


def two_groups(kind, **options):
    def make(model):
        trained = [p for p in model.parameters() if p.requires_grad]
        groups = [{"params": trained[:2], "lr": 0.02}, {"params": trained[2:], "weight_decay": 0.1}]
        return kind(groups, lr=0.05, **options)

    return make


OPTIMIZERS = {
    "AdamW": two_groups(torch.optim.AdamW, amsgrad=True),
    "AdamW-fused": two_groups(torch.optim.AdamW, fused=True),
    "Adam-for-loop": two_groups(torch.optim.Adam, foreach=False),
    "SGD": two_groups(torch.optim.SGD),
    "SGD-momentum": two_groups(torch.optim.SGD, momentum=0.9, nesterov=True),
    "SGD-fused": two_groups(torch.optim.SGD, momentum=0.9, fused=True),
    "Adagrad": two_groups(torch.optim.Adagrad),
    "Adafactor": two_groups(torch.optim.Adafactor),
    "NAdam": two_groups(torch.optim.NAdam),
    "Rprop": lambda model: torch.optim.Rprop(model.parameters()),
    "ASGD": two_groups(torch.optim.ASGD),
    "tensor-lr": lambda m: torch.optim.AdamW(m.parameters(), lr=torch.tensor(0.01), foreach=False),
}
SCHEDULERS = {
    "cosine": lambda o: CosineAnnealingLR(o, 20),
    "one-cycle": lambda o: OneCycleLR(o, max_lr=0.1, total_steps=50),
    "multi-step": lambda o: MultiStepLR(o, [2, 4, 4]),
    "lambda": lambda o: LambdaLR(o, lambda step: 0.9**step),
    "plateau": lambda o: ReduceLROnPlateau(o, patience=0),
    "sequential": lambda o: SequentialLR(
        o, [LambdaLR(o, lambda s: 0.1 * s + 0.1), CosineAnnealingLR(o, 9)], milestones=[3]
    ),
}
BUILDS = {
    **{name: full_build(make) for name, make in OPTIMIZERS.items()},
    **{name: full_build(OPTIMIZERS["SGD-momentum"], make) for name, make in SCHEDULERS.items()},
}


@pytest.mark.parametrize("name", BUILDS)
@pytest.mark.parametrize("where", ["clean", "dirty", "in backward"])
@pytest.mark.parametrize("reuse", [False, True], ids=["new module", "same module"])
def test_interrupted_and_entered_again(name, where, reuse):
    """Three steps, an interruption somewhere in the fourth, four more: as if nothing had been."""
    build = BUILDS[name]
    torch.manual_seed(5)
    unbroken = Run(Protected(), build).train(8)

    torch.manual_seed(5)
    protected = Protected()
    run = Run(protected, build).train(2 if where == "dirty" else 3)
    step, expected = run.step, state_of(run.objects)
    if where == "dirty":  # within the first steps of an entry an undo copy is always there
        protected.commit(run.step)
        protected._num_commits = STEPS_WITH_UNDO - 1
        run.half_step()
    elif where == "in backward":
        run.backward()  # moves batch norm's buffers and the generators
    holdings = protected.holdings()
    assert holdings[0] == Holding(step, "undo" if where == "dirty" else "live")
    model = run.model if reuse else None
    del run
    torch.rand(7)
    again = Run(protected, build, Cut(CutKind.MEMORY, step, (0,)), model)
    assert again.step == step
    assert_same(state_of(again.objects), expected)
    assert all(p.grad is None for p in again.model.parameters())
    again.train(8 - step)
    assert_same(state_of(again.objects), state_of(unbroken.objects))


def test_a_survivor_copies_nothing():
    protected = Protected()
    build = BUILDS["AdamW"]
    run = Run(protected, build).train(4)
    tensors = [*run.model.parameters(), *run.optimizer.state[run.model.hidden.weight].values()]
    versions = [t._version for t in tensors]
    assert protected.holdings() == (Holding(4, "live"),)
    again = Run(protected, build, Cut(CutKind.MEMORY, 4, (0,)), run.model)
    assert again.optimizer is not run.optimizer
    state = again.optimizer.state[again.model.hidden.weight].values()
    assert all(a is b for a, b in zip([*again.model.parameters(), *state], tensors, strict=True))
    assert [t._version for t in tensors] == versions


def test_the_same_objects_again():
    """Made at module level, not in the train function."""
    objects = full_build(OPTIMIZERS["AdamW"], SCHEDULERS["cosine"])()
    protected = Protected()
    run = Run(protected, lambda: objects).train(1)
    expected = state_of(objects)
    run.half_step()
    assert protected.holdings() == (Holding(1, "undo"),)
    again = Run(protected, lambda: objects, Cut(CutKind.MEMORY, 1, (0,)))
    assert_same(state_of(objects), expected)
    assert protected.holdings() == (Holding(1, "live"),)
    assert len(objects["optimizer"]._optimizer_step_pre_hooks) == 0  # released
    assert again.step == 1


def test_undo_then_again_undo():
    """The optimizer state of an undo copy is adopted; the next copy must not lie in it."""
    torch.manual_seed(1)
    unbroken = Run(Protected(), BUILDS["AdamW"]).train(6)
    torch.manual_seed(1)
    protected = Protected()
    run = Run(protected, BUILDS["AdamW"])
    for step in range(1, 4):
        run.train(1)
        run.half_step()
        assert Holding(step, "undo") in protected.holdings()
        run = Run(protected, BUILDS["AdamW"], Cut(CutKind.MEMORY, step, (0,)), run.model)
    run.train(3)
    assert_same(state_of(run.objects), state_of(unbroken.objects))


def test_what_is_held_when():
    protected = Protected()
    assert protected.holdings() == ()
    run = Run(protected, BUILDS["SGD-momentum"])
    held = protected._held
    assert held(0) is not None and not protected.stepped
    run.half_step()
    assert held(0) is protected._undo and held(1) is None
    run.step = 1
    protected.commit(1)
    assert held(1) is protected._live and held(0) is protected._undo
    run.train(STEPS_WITH_UNDO - 1)
    run.half_step()  # no undo any more
    assert held(run.step) is None
    run.step += 1
    protected.commit(run.step)
    assert protected._undo is None, "its memory is given back"
    with torch.no_grad():
        run.model.hidden.bias += 1
    assert held(run.step) is None, "written to without a step"
    assert protected.holdings() == ()


def test_fused_steps_do_not_move_versions_but_are_seen():
    protected = Protected()
    run = Run(protected, BUILDS["AdamW-fused"]).train(3)
    run.half_step()
    assert protected.holdings() == ()


def test_written_over_before_protect_is_said():
    protected = Protected()
    run = Run(protected, BUILDS["AdamW"]).train(3)
    assert protected.holdings() == (Holding(3, "live"),)
    nn.init.zeros_(run.model.hidden.weight)
    with pytest.raises(CheckpointMissing, match=r"job\.build"):
        Run(protected, BUILDS["AdamW"], Cut(CutKind.MEMORY, 3, (0,)), run.model)


def test_closure_takes_an_undo_copy_and_lbfgs_comes_back():
    def build(model=None):
        model = model or nn.Linear(4, 2)
        return {"model": model, "optimizer": torch.optim.LBFGS(model.parameters(), max_iter=3)}

    x = torch.randn(16, 4)

    def step(run):
        def closure():
            run.optimizer.zero_grad()
            loss = run.model(x).square().mean()
            loss.backward()
            return loss

        run.optimizer.step(closure)

    def train(run, n):
        for _ in range(n):
            step(run)
            run.step += 1
            run.protected.commit(run.step)
        return run

    torch.manual_seed(0)
    unbroken = train(Run(Protected(), build), 7)
    torch.manual_seed(0)
    protected = Protected()
    run = train(Run(protected, build), 4)
    step(run)
    assert protected.holdings() == (Holding(4, "undo"),)
    run = train(Run(protected, build, Cut(CutKind.MEMORY, 4, (0,))), 3)
    assert_same(state_of(run.objects), state_of(unbroken.objects))


def test_several_optimizers_always_have_an_undo_copy():
    notes = []

    def build():
        a, b = nn.Linear(3, 3), nn.Linear(3, 3)
        return {
            "model": a,
            "critic": b,
            "optimizer": torch.optim.Adam(a.parameters()),
            "critic_optimizer": torch.optim.Adam(b.parameters()),
        }

    protected = Protected(note=notes.append)
    run = Run(protected, build)

    def half(k):
        for model, optimizer in (("model", "optimizer"), ("critic", "critic_optimizer")):
            run.objects[model](torch.ones(2, 3)).sum().backward()
            run.objects[optimizer].step()
            if k == "first":
                return

    for step in range(1, 6):
        half("both")
        protected.commit(step)
    expected = state_of(run.objects)
    half("first")
    assert protected.holdings() == (Holding(5, "undo"),)
    again = Run(protected, build, Cut(CutKind.MEMORY, 5, (0,)))
    assert_same(state_of(again.objects), expected)
    assert len(notes) == 1 and "several optimizers" in notes[0] and "MiB" in notes[0]


def test_average_is_big_state_without_an_optimizer():
    def build(model=None):
        objects = BUILDS["SGD"](model)
        objects["ema"] = AveragedModel(
            objects["model"], multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True
        )
        return objects

    protected = Protected()
    run = Run(protected, build).train(1)
    expected = state_of(run.objects)
    run.half_step()
    assert protected.holdings() == (Holding(1, "undo"),)
    again = Run(protected, build, Cut(CutKind.MEMORY, 1, (0,)))
    assert_same(state_of(again.objects), expected)
    assert again.objects["ema"].n_averaged.item() == 1


def test_scaler():
    def build():
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        return {"model": model, "optimizer": optimizer, "scaler": scaler}

    protected = Protected()
    run = Run(protected, build)
    scaler = run.objects["scaler"]

    def step(value):
        run.optimizer.zero_grad()
        scaler.scale(run.model(torch.full((2, 4), value)).sum()).backward()
        assert not protected.stepped, "scaling a loss is no step"
        scaler.step(run.optimizer)
        scaler.update()

    step(1.0)
    assert protected.stepped
    protected.commit(1)
    assert not protected.stepped
    step(float("inf"))  # the optimizer is not called, and yet the step was made
    assert protected.stepped
    protected.commit(2)
    step(1.0)
    protected.commit(3)
    expected = scaler.state_dict()
    assert expected["scale"] == 512.0 and expected["_growth_tracker"] == 1
    protected.holdings()
    again = Run(protected, build, Cut(CutKind.MEMORY, 3, (0,)))
    again.objects["scaler"].scale(torch.ones(()))
    assert again.objects["scaler"].state_dict() == expected


def test_disabled_scaler():
    def build():
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return {
            "model": model,
            "optimizer": optimizer,
            "scaler": torch.amp.GradScaler("cpu", enabled=False),
        }

    protected = Protected()
    run = Run(protected, build)
    run.model(torch.ones(1, 4)).sum().backward()
    run.optimizer.step()
    protected.commit(1)
    protected.holdings()
    Run(protected, build, Cut(CutKind.MEMORY, 1, (0,)))


def test_tied_weights_and_a_module_given_twice():
    model = Net()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    inventory = Inventory(
        {"model": model, "again": model, "part": model.hidden, "optimizer": optimizer}
    )
    assert len(inventory.parameters) == len(list(model.parameters()))
    assert all(key.startswith("model.") for key in inventory.parameters)
    assert [key for key in inventory.parameters if "head" in key] == []
    assert inventory.static == {"model.frozen.weight", "model.frozen.bias"}
    assert len([key for key in inventory.read_buffers() if "running_mean" in key]) == 1


def test_parameters_that_only_the_optimizer_knows():
    def build():
        weight = torch.zeros(3, requires_grad=True)
        return {"optimizer": torch.optim.Adam([weight], lr=0.1), "cursor": Cursor()}

    protected = Protected()
    objects = build()
    protected.protect(objects, cut=Cut(CutKind.INITIAL, 0), rank=0, world_size=1)
    weight = objects["optimizer"].param_groups[0]["params"][0]
    (weight * torch.arange(3)).sum().backward()
    objects["optimizer"].step()
    protected.commit(1)
    protected.holdings()
    new = build()
    protected.protect(new, cut=Cut(CutKind.MEMORY, 1, (0,)), rank=0, world_size=1)
    assert torch.equal(new["optimizer"].param_groups[0]["params"][0], weight)


def test_large_buffers_are_copied_only_when_written():
    protected = Protected()
    run = Run(protected, BUILDS["SGD"]).train(1)
    first = protected._small[1].buffers
    run.train(1)
    second = protected._small[2].buffers
    assert first["model.mask"] is second["model.mask"]
    assert first["model.norm.running_mean"] is not second["model.norm.running_mean"]
    assert not torch.equal(first["model.norm.running_mean"], second["model.norm.running_mean"])
    run.model.mask[0, 0] = 7
    run.train(1)
    assert protected._small[3].buffers["model.mask"][0, 0] == 7
    assert protected._small[2].buffers["model.mask"][0, 0] == 1


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("seen", None)
        self.scale = None

    def forward(self, x):
        if self.scale is None:
            del self.scale
            self.register_buffer("scale", x.abs().mean())
        self.seen = x.sum(0) if self.seen is None else self.seen + x.sum(0)  # replaced, not written
        return self.linear(x) * self.scale


def test_buffers_that_appear_later_or_are_replaced():
    def build():
        model = Lazy()
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}

    protected = Protected()
    run = Run(protected, build)
    for step in range(1, 5):
        run.model(torch.full((2, 2), float(step))).sum().backward()
        run.optimizer.step()
        protected.commit(step)
    expected = dict(run.model.named_buffers())
    assert set(expected) == {"seen", "scale"}
    protected.holdings()
    again = Run(protected, build, Cut(CutKind.MEMORY, 4, (0,)))
    assert_same(dict(again.model.named_buffers()), expected)


def test_a_group_added_while_training():
    protected = Protected()

    def build(extra=False):
        model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
        optimizer = torch.optim.SGD(model["a"].parameters(), lr=0.1, momentum=0.9)
        if extra:
            optimizer.add_param_group({"params": model["b"].parameters()})
        return {"model": model, "optimizer": optimizer}

    run = Run(protected, build)
    for step in range(1, 5):
        if step == 3:
            run.optimizer.add_param_group({"params": run.model["b"].parameters()})
        run.model["b"](run.model["a"](torch.ones(1, 2))).sum().backward()
        run.optimizer.step()
        protected.commit(step)
    expected = state_of(run.objects)
    protected.holdings()
    with pytest.raises(ConfigError, match="make the same groups"):
        Run(protected, build, Cut(CutKind.MEMORY, 4, (0,)))
    again = Run(protected, lambda: build(True), Cut(CutKind.MEMORY, 4, (0,)))
    assert_same(state_of(again.objects), expected)


def test_extra_state_and_own_format_of_an_optimizer():
    class WithExtra(nn.Linear):
        calls = 0

        def get_extra_state(self):
            return {"calls": self.calls}

        def set_extra_state(self, state):
            self.calls = state["calls"]

    class Lookahead(torch.optim.SGD):
        def state_dict(self):
            return {**super().state_dict(), "slow": self.slow}

        def load_state_dict(self, state):
            state = dict(state)
            self.slow = state.pop("slow")
            super().load_state_dict(state)

    def build():
        model = WithExtra(2, 2)
        optimizer = Lookahead(model.parameters(), lr=0.1, momentum=0.9)
        optimizer.slow = torch.zeros(2)
        return {"model": model, "optimizer": optimizer}

    protected = Protected()
    run = Run(protected, build)
    for step in range(1, 5):
        run.model(torch.ones(1, 2)).sum().backward()
        run.model.calls += 1
        run.optimizer.slow += 1
        run.optimizer.step()
        protected.commit(step)
    run.optimizer.slow += 1
    protected.holdings()
    again = Run(protected, build, Cut(CutKind.MEMORY, 4, (0,)))
    assert again.model.calls == 4
    assert torch.equal(again.optimizer.slow, torch.full((2,), 4.0))
    assert_same(
        [s["momentum_buffer"] for s in again.optimizer.state.values()],
        [s["momentum_buffer"] for s in run.optimizer.state.values()],
    )


def test_scheduler_that_writes_the_rate_when_loaded():
    class Eager(CosineAnnealingLR):
        def load_state_dict(self, state):
            super().load_state_dict(state)
            for group in self.optimizer.param_groups:
                group["lr"] = 99.0

    build = full_build(OPTIMIZERS["SGD"], lambda o: Eager(o, 20))
    protected = Protected()
    run = Run(protected, build).train(3)
    rates = [group["lr"] for group in run.optimizer.param_groups]
    protected.holdings()
    again = Run(protected, build, Cut(CutKind.MEMORY, 3, (0,)))
    assert [group["lr"] for group in again.optimizer.param_groups] == rates


def test_generators_of_a_predecessor():
    page = Page.create()
    protected = Protected(page)
    run = Run(protected, BUILDS["SGD"]).train(3)
    run.half_step()  # tentative(4) was kept
    expected = {step: protected._generators.by_step[step] for step in (3, 4)}
    for step in (3, 4):
        assert page.kept(step) == expected[step]
    state = Run(protected, BUILDS["SGD"]).objects
    del run
    for step in (3, 4):
        torch.manual_seed(99)
        successor = Protected()
        successor._generators.restore(step, 0, page)
        expected_torch = bytearray(torch_part(expected[step]))
        assert bytearray(torch.get_rng_state().numpy()) == expected_torch
    assert state
    notes = []
    Protected(note=notes.append)._generators.restore(77, 0, page)
    assert len(notes) == 1 and "seeded" in notes[0]
    page.close()


def torch_part(data):
    from resilient.state.encoding import decode

    return decode(data)[2]


@pytest.mark.parametrize(
    ("objects", "words"),
    [
        (lambda m, o: {"model": m, "cursor": object()}, ["cursor", "without state_dict()"]),
        (lambda m, o: {"model": m, "lr": 0.1}, ["lr", "float"]),
        (lambda m, o: {"model": nn.LazyLinear(3)}, ["model.weight", "run one batch"]),
        (lambda m, o: {"model": m, "o": Duck(m)}, ["o=", "without torch's step hooks"]),
        (lambda m, o: {"model": m, "o": Unhooked(m)}, ["o=", "no torch step hooks"]),
        (lambda m, o: {"model": m, "o": Sharpness(o)}, ["o=", ".base", "protect that one too"]),
        (lambda m, o: {"model": m, "x": Holder({"a": [print]})}, ["x.a.0", "builtin_function"]),
        (
            lambda m, o: {"model": nn.Module().register_module("x", None) or Meta()},
            ["model.w", "meta"],
        ),
    ],
)
def test_refused_in_one_line(objects, words):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError) as caught:
        Protected().protect(
            objects(model, optimizer), cut=Cut(CutKind.INITIAL, 0), rank=0, world_size=1
        )
    text = str(caught.value)
    assert "\n" not in text
    for word in words:
        assert word in text


class Meta(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2, device="meta"))


class Holder:
    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


class Duck(Holder):
    def __init__(self, model):
        super().__init__({})
        self.param_groups = [{"params": list(model.parameters())}]

    def step(self):
        pass


class Unhooked(torch.optim.SGD):
    def __init__(self, model):
        self.defaults, self.state = {}, {}
        self.param_groups = [{"params": list(model.parameters())}]


class Sharpness(torch.optim.SGD):
    def __init__(self, base):
        super().__init__(base.param_groups[0]["params"], lr=0.1)
        self.base = base


@pytest.mark.parametrize("change", ["shape", "dtype", "missing", "extra", "objects"])
def test_other_objects_at_the_next_entry(change):
    protected = Protected()

    def build(**options):
        model = nn.Sequential(nn.Linear(2, options.get("width", 2)), *options.get("more", []))
        model.to(options.get("dtype", torch.float32))
        objects = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
        return objects | options.get("objects", {})

    first = build(more=[nn.Linear(2, 2)] if change == "missing" else [])
    protected.protect(first, cut=Cut(CutKind.INITIAL, 0), rank=0, world_size=1)
    protected.holdings()
    other = {
        "shape": {"width": 3},
        "dtype": {"dtype": torch.float64},
        "missing": {},
        "extra": {"more": [nn.Linear(2, 2)]},
        "objects": {"objects": {"cursor": Cursor()}},
    }[change]
    new = build(**other)
    before = state_of(new)
    with pytest.raises(ConfigError) as caught:
        protected.protect(new, cut=Cut(CutKind.MEMORY, 0, (0,)), rank=0, world_size=1)
    assert "\n" not in str(caught.value)
    expected = {
        "shape": "model.0.weight",
        "dtype": "model.0.weight",
        "missing": "model.1.weight",
        "extra": "model.1.weight",
        "objects": "cursor",
    }[change]
    assert expected in str(caught.value)
    assert_same(state_of(new), before)
    assert protected.holdings() == (Holding(0, "live"),)


def test_a_holding_names_the_generation_that_made_it():
    """A state that was committed in one generation is not another's until that one restored it."""
    build = BUILDS["SGD"]
    objects = build()
    protected = Protected()
    options = {"rank": 0, "world_size": 1}
    protected.protect(objects, cut=Cut(CutKind.INITIAL, 0), generation=3, **options)
    protected.commit(1)
    assert protected.holdings() == (Holding(1, "live", 3),)
    with pytest.raises(ConfigError):  # generation 4 ends before anything is restored in it
        protected.protect({}, cut=Cut(CutKind.MEMORY, 1, (0,)), generation=4, **options)
    assert protected.holdings() == (Holding(1, "live", 3),)
    protected.protect(objects, cut=Cut(CutKind.MEMORY, 1, (0,)), generation=5, **options)
    assert protected.holdings()[0] == Holding(1, "live", 5)


def test_commit_without_protect():
    with pytest.raises(ConfigError, match=r"job\.protect"):
        Protected().commit(1)


def test_small_state_that_turns_bad_later():
    holder = Holder({"x": 1})
    protected = Protected()
    run = Run(protected, lambda: {**BUILDS["SGD"](), "log": holder}).train(1)
    holder.state["fn"] = print
    run.half_step()
    with pytest.raises(ConfigError, match=r"log\.fn"):
        protected.commit(2)


def test_rewind_before_the_first_batch():
    protected = Protected()
    run = Run(protected, BUILDS["SGD"]).train(2)
    state = torch.get_rng_state()
    protected.holdings()
    run = Run(protected, BUILDS["SGD"], Cut(CutKind.MEMORY, 2, (0,)))
    torch.rand(3)
    protected.rewind_rng()
    assert torch.equal(torch.get_rng_state(), state)
    run.train(1)
    state = torch.get_rng_state()
    protected.rewind_rng()
    assert torch.equal(torch.get_rng_state(), state), "only before the first step"


def test_strides_are_those_of_the_parameter():
    def build(model=None):
        model = model or nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        return {"model": model, "optimizer": torch.optim.Adam(model.parameters())}

    protected = Protected()
    run = Run(protected, build)
    for step in itertools.chain((1, 2)):
        run.model(torch.ones(1, 3, 5, 5)).sum().backward()
        run.optimizer.step()
        protected.commit(step)
    image = protected._image(2)
    new = build()
    inventory = Inventory(new)
    flat = {key: t.contiguous().clone() for key, t in image.states.items()}
    image.states = flat
    inventory.restore(image)
    weight = new["model"].weight
    assert new["optimizer"].state[weight]["exp_avg"].stride() == weight.stride()
    assert_same(new["optimizer"].state_dict(), run.optimizer.state_dict())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_interrupted_in_the_first_broadcast_keeps_its_generators(monkeypatch, rank):
    """Others may hold step 0 by then; this rank receives it, and nobody has its random numbers."""

    def interrupt(*_):
        raise RuntimeError("severed")

    monkeypatch.setattr("resilient.state.transfer.send", interrupt)
    monkeypatch.setattr("resilient.state.transfer.receive", interrupt)
    page = Page.create()
    protected, model = Protected(page), Net()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    begin = {"cut": Cut(CutKind.INITIAL, 0), "rank": rank, "world_size": 2}
    with pytest.raises(RuntimeError, match="severed"):
        protected.protect({"model": model}, **begin)
    assert protected.holdings() == ()

    torch.manual_seed(99)
    twin = Protected()
    twin.protect({"model": Net()}, cut=Cut(CutKind.INITIAL, 0), rank=0, world_size=1)
    image = twin._image(0)
    monkeypatch.setattr("resilient.state.transfer.receive", lambda *_: image)
    for again in (protected, Protected()):  # the same process; and one that takes its place
        torch.manual_seed(99)
        again.protect(
            {"model": Net()},
            cut=Cut(CutKind.MEMORY, 0, (1 - rank,)),
            rank=rank,
            world_size=2,
            predecessor=None if again is protected else page,
        )
        assert torch.equal(torch.rand(3), expected)
    page.close()
